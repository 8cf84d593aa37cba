"""Environments that meet, block, break or answer nonsense, for tests of the pool; and a pool's answers by number."""

import asyncio
import json
import os
import subprocess
import threading
from pathlib import Path

from megarl.environments.protocol import BaseEnvironment, Observation, Task
from tests.helpers.waiting import SAFETY_SECONDS, wait_until

HERE = "tests.helpers.envs.odd_environments"
MEETING = 8
_doomed = threading.Event()
_async_barrier, _barrier = asyncio.Barrier(MEETING), threading.Barrier(MEETING)


class Echo(BaseEnvironment):
    """Answers with the turn's text, its number, and the task's seed."""

    def step(self, turn):
        return Observation([{"role": "user", "content": f"{turn.number}: {turn.text}"}], reward=float(turn.number))


class Yields(Echo):
    """Gives its answers one by one."""

    async def step(self, turn):
        yield super().step(turn)


class Typed(Echo):
    """Has a tool, and answers with the calls of the turn as JSON."""

    tools = [{"type": "function", "function": {"name": "f", "parameters": {  # never changed in place
        "type": "object", "properties": {"s": {"type": "string"}, "x": {"type": "integer"}}}}}]  # fmt: skip

    def step(self, turn):
        calls = [[call.id, call.name, call.arguments] for call in turn.calls]
        return Observation([{"role": "user", "content": json.dumps([turn.text, *calls])}])


class AsyncMeeting(Echo):
    """Answers when `MEETING` episodes wait for an answer on the event loop."""

    async def step(self, turn):
        await _async_barrier.wait()
        return super().step(turn)


class ThreadMeeting(Echo):
    """Answers when `MEETING` episodes wait for an answer in threads."""

    def step(self, turn):
        _barrier.wait()
        return super().step(turn)


class Long(Echo):
    """Answers with 500,000 characters."""

    def step(self, turn):
        return Observation([{"role": "user", "content": "x" * 500_000}])


class LoopBlocker(Echo):
    """Blocks the event loop, once."""

    async def step(self, turn):
        """Waits in a way that stops all other episodes, too."""
        if turn.text == "block" and not _seen("blocked"):
            threading.Event().wait()
        return super().step(turn)


class Neighbours(Echo):
    """At `die` its process ends and at `stick` it never answers, while others wait at `meet` for that to happen."""

    def step(self, turn):
        if turn.text == "die":
            _doomed.set()
            os._exit(3)
        if turn.text == "stick":
            _doomed.set()
            threading.Event().wait()
        if turn.text == "meet":
            _doomed.wait(0.2)  # where nobody breaks the process, it goes on
        return super().step(turn)


class Unreplayable(Neighbours):
    """Says that it cannot be replayed."""

    replayable = False


class Child(Echo):
    """Starts a process that outlives the episode; prints to standard output; leaves."""

    def step(self, turn):
        print("printed by an environment")
        child = subprocess.Popen(["sleep", str(SAFETY_SECONDS)])
        return Observation([{"role": "user", "content": str(child.pid)}])


class Unrepeatable(Echo):
    """Cannot be replayed, says so, and breaks at the text `break`."""

    replayable = False

    def step(self, turn):
        if turn.text == "break":
            raise KeyError(turn.number)
        return super().step(turn)


class Unlike(Echo):
    """Counts how often it was made, and answers with the count: it says that it can be replayed and cannot."""

    def reset(self, task: Task):
        path = Path(os.environ["MEGARL_TEST_FOLDER"], "made")
        with open(path, "a") as file:
            file.write("x")
        self._count = len(path.read_text())
        return Observation()

    def step(self, turn):
        if turn.number == 1 and not _seen("left"):
            os._exit(1)
        return Observation([{"role": "user", "content": str(self._count)}])


class Watched(Echo):
    """Works until it is told to go on; `close` notes whether it worked."""

    works = False

    def step(self, turn):
        self.works = True
        _seen("works")
        wait_until(Path(os.environ["MEGARL_TEST_FOLDER"], "go").exists)
        self.works = False
        return super().step(turn)

    def close(self):
        Path(os.environ["MEGARL_TEST_FOLDER"], "closed").write_text(f"works: {self.works}")


class Wrong(Echo):
    """Answers with what the turn's text names, none of it an observation."""

    ANSWERS = {
        "none": None,
        "reward": Observation(reward=float("nan")),
        "role": Observation([{"role": "assistant", "content": "a"}]),
        "content": Observation([{"role": "user", "content": 3}]),
        "messages": Observation("text"),
        "field": Observation([{"role": "user", "content": "a", "html": "b"}]),
        "parts": Observation(parts={"a": "b"}),
        "size": Observation([{"role": "user", "content": "x" * 2_000_000}]),
        "surrogate": Observation([{"role": "user", "content": "a\ud800b"}], reward=True),
    }

    def step(self, turn):
        return self.ANSWERS[turn.text]


def _seen(name: str) -> bool:
    """Whether this was asked before, in any process of the test."""
    path = Path(os.environ["MEGARL_TEST_FOLDER"], name)
    was_there = path.exists()
    path.touch()
    return was_there


class Plays:
    """A pool and the episodes of a test; waits for answers by their number, not for time."""

    def __init__(self, environment: str, journal=None, workers=1, retries=1, timeout=SAFETY_SECONDS, images=None):
        from megarl.environments.pool import EnvironmentPool, PoolOptions

        name = environment if ":" in environment else f"{HERE}:{environment}"
        self.pool = EnvironmentPool(PoolOptions(workers, timeout, retries, "hermes", name, images), journal)
        self.events = {}  # latest of each episode

    def processes(self) -> list[int]:
        return [process.process.pid for process in self.pool._processes]

    def start(self, *numbers, key=None, seed=0):
        """Begins episodes and waits for their resets."""
        for number in numbers:
            self.pool.start(number, Task([], seed=seed), key=key and f"{key}/{number}")
        return self.collect(numbers)

    def step(self, texts: dict[int, str]):
        """Sends turns, all before the first answer; returns the events by number."""
        for number, text in texts.items():
            self.pool.step(number, text)
        return self.collect(texts)

    def collect(self, numbers) -> dict:
        """The next event of each of these episodes."""
        found = {}
        while set(numbers) - set(found):
            for event in self.pool.poll(1.0):
                assert event.number not in found
                found[event.number] = event
        return found

    def text(self, number: int, text: str) -> str:
        """What the environment of an episode answers."""
        event = self.step({number: text})[number]
        assert event.failure is None, event.failure
        return event.observation.messages[0]["content"]
