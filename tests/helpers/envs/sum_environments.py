"""Environments for runs of the small programs: they answer with sums, late, or break, as their names say.

Texts have only the characters of the small tokenizer: digits, + and =.
"""

import asyncio
import base64
import dataclasses
import os
import random
from pathlib import Path

from megarl.environments.protocol import BaseEnvironment, Observation, Task, Turn

FOLDER = "MEGARL_TEST_FOLDER"  # environment variable: where calls are counted and breakdowns are remembered


# Flags of a run of two steps with episodes.
EPISODES = (
    "--advantage rloo --kl-coefficient 0 --train-iters 2 --save-interval 1 --max-response-length 18 --max-turns 3"
    " --max-turn-length 4 --max-tokens-per-microbatch 100 --rollout-max-requests 64 --environment-timeout 60"
    " --save-rollouts"
)


class Sums(BaseEnvironment):
    """Asks for another sum after each turn, three times; the reward grows with the sevens of the text."""

    def __init__(self):
        self._random, self._asked = None, 0

    def reset(self, task: Task) -> Observation:
        """The same sums for all samples of a group."""
        self._random, self._asked = random.Random(task.seed), 0
        return Observation()

    def step(self, turn: Turn) -> Observation:
        """An answer that depends on the seed and on what was written."""
        self._asked += 1
        reward = turn.text.count("7") / 4 + len(turn.text) / 64
        number = (self._random.randrange(30) + len(turn.text)) % 30
        message = {"role": "user", "content": f"+{number}="}
        return Observation([message], reward, self._asked == 3, parts={"sevens": turn.text.count("7") / 4})


class OpeningSums(Sums):
    """Adds another sum to the prompt of each episode."""

    def reset(self, task: Task) -> Observation:
        """One that differs between the samples of a group."""
        super().reset(task)
        return Observation([{"role": "user", "content": f"{task.sample_seed % 10}+"}])


class PicturedSums(Sums):
    """Shows a picture before each sum: one of Pillow, bytes, and a data: URL in turn. `reset` shows one, too."""

    def reset(self, task: Task) -> Observation:
        super().reset(task)
        return Observation([self._shown("+1=", 0)])

    def step(self, turn: Turn) -> Observation:
        seen = super().step(turn)
        text = seen.messages[0]["content"]
        return dataclasses.replace(seen, messages=[self._shown(text, self._asked + len(turn.text))])

    def _shown(self, text: str, number: int) -> dict:
        from tests.helpers.texts.picture_prompts import encoded, picture

        width, height = [(64, 64), (96, 64), (64, 96)][number % 3]
        image = picture(width, height, self._random.randrange(3))
        url = f"data:image/png;base64,{base64.b64encode(encoded(image)).decode()}"
        part = [
            {"type": "image", "image": image},
            {"type": "image", "image": {"bytes": encoded(image, "BMP")}},
            {"type": "image_url", "image_url": {"url": url}},
        ][self._asked % 3]
        return {"role": "user", "content": [part, {"type": "text", "text": text}]}


class LateSums(Sums):
    """Answers after up to 50 ms, each time another; not as long as a test would wait."""

    async def step(self, turn: Turn) -> Observation:
        """Waits a random time, which no seed decides."""
        await asyncio.sleep(random.SystemRandom().random() * 0.05)
        return super().step(turn)


class CountedSums(Sums):
    """Writes a line for each call to a file, before it answers."""

    def reset(self, task: Task) -> Observation:
        """Remembers whose calls these are."""
        self._name = f"{task.seed} {task.sample_seed}"
        return super().reset(task)

    def restore(self, task: Task, turns: list[Turn], observations: list[Observation]):
        """Goes on without calls."""
        self.reset(task)
        for turn in turns:
            super().step(turn)

    def step(self, turn: Turn) -> Observation:
        """Counts the call."""
        with open(Path(os.environ[FOLDER], "calls"), "a") as file:
            file.write(f"{self._name} {turn.number}\n")
        return super().step(turn)


class BreakingSums(Sums):
    """Breaks once in each turn of the run; `how`: it ends its process, hangs, or raises."""

    def __init__(self, how: str):
        super().__init__()
        self._how = how

    def step(self, turn: Turn) -> Observation:
        """Breaks if it is the first that comes to this turn."""
        if _is_first(f"{self._how}-{turn.number}"):
            if self._how == "kill":
                os._exit(3)
            if self._how == "hang":
                import threading

                threading.Event().wait()
            raise RuntimeError("broken on purpose")
        return super().step(turn)


class UnreplayableSums(Sums):
    """Says that it cannot be replayed."""

    replayable = False


class FailingSums(Sums):
    """Always breaks in the second turn of some episodes."""

    def reset(self, task: Task) -> Observation:
        """Chooses which episodes break."""
        self._breaks = task.sample_seed % 3 == 0
        return super().reset(task)

    def step(self, turn: Turn) -> Observation:
        """Raises in the second turn."""
        if self._breaks and turn.number == 1:
            raise RuntimeError("broken for good")
        return super().step(turn)


class OnceOnlySums(FailingSums):
    """Cannot be replayed, and always breaks in the second turn of some groups."""

    replayable = False

    def reset(self, task: Task) -> Observation:
        """Chooses which groups break."""
        observation = super().reset(task)
        self._breaks = task.seed % 3 == 0
        return observation


def _is_first(name: str) -> bool:
    try:
        os.close(os.open(Path(os.environ[FOLDER], name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def kill() -> BreakingSums:
    """Its process ends."""
    return BreakingSums("kill")


def hang() -> BreakingSums:
    """It never answers."""
    return BreakingSums("hang")


def crash() -> BreakingSums:
    """It raises."""
    return BreakingSums("crash")


class ThinkingSums(Sums):
    """Opens thoughts before each turn, for the tokenizer of `thinkers`."""

    def step(self, turn: Turn) -> Observation:
        """As `Sums`."""
        seen = super().step(turn)
        return Observation([{**seen.messages[0], "content": seen.messages[0]["content"] + "<think>"}], seen.reward,
                           seen.done)  # fmt: skip
