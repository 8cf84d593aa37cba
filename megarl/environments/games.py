"""Small games with exact answers, for checks that a policy learns from what its environment says."""

import random
import re

from megarl.environments.protocol import BaseEnvironment, Observation, Task, Turn

_NUMBER = re.compile(r"\d{1,9}")


class GuessNumber(BaseEnvironment):
    """A hidden number of `low` to `high`: a guess is answered with higher or lower.

    The prompt's metadata may give `low` (1), `high` (15) and `guesses` (4). A policy that ignores the answers guesses
    right with a probability of at most guesses / (high − low + 1).
    """

    def __init__(self, is_blind: bool = False):
        """`is_blind`: every wrong guess gets the same answer, so that nothing can be learnt from it."""
        self._is_blind, self._number, self._left = is_blind, 0, 0

    def reset(self, task: Task) -> Observation:
        """Draws the number by the task's seed."""
        low, high = int(task.metadata.get("low", 1)), int(task.metadata.get("high", 15))
        self._number = random.Random(task.seed).randint(low, high)
        self._left = int(task.metadata.get("guesses", 4))
        return Observation()

    def step(self, turn: Turn) -> Observation:
        """Compares the first number of the turn with the hidden one."""
        found = _NUMBER.search(turn.content)
        guess = None if found is None else int(found[0])
        self._left -= 1
        if guess == self._number:
            return Observation(reward=1.0, done=True, correct=True)
        answer = "wrong" if self._is_blind or guess is None else "higher" if guess < self._number else "lower"
        return Observation([{"role": "user", "content": answer}], done=self._left <= 0, correct=False)


def guess_number() -> GuessNumber:
    """The game, with answers."""
    return GuessNumber()


def guess_number_blind() -> GuessNumber:
    """The game whose answers say nothing: what it teaches is not how to use them."""
    return GuessNumber(is_blind=True)
