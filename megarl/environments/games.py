"""Built-in games: `guess-number`, and `guess-number-blind`, its control experiment."""

import random
import re
from typing import Any

from megarl.environments.protocol import BaseEnvironment, Observation, Task, Turn, user_message

_INTEGER = re.compile(r"[0-9]+")
_MAX_DIGITS = 18  # of a guess that is read as a number


class GuessNumber(BaseEnvironment):
    """The policy guesses a number, which the task's seed draws, and is told whether it is higher or lower.

    The metadata may give `low` and `high`, the range (1 to 15), and `guesses`, the turns (4). The first integer of a
    turn is its guess. The reward is 1 for the right guess, which ends the episode, as the last guess does; so does a
    turn without a number of the range: a policy could gain entropy by guesses that cost little. With `blind` every
    answer is the same, so no policy finds one of n numbers in g guesses more often than g times in n.
    """

    def __init__(self, blind: bool = False):
        self._blind = blind
        self._range, self._secret, self._left = range(0), 0, 0

    def reset(self, task: Task) -> Observation:
        """Draws the number. ValueError if the metadata are not a range and a number of guesses."""
        low, high = _number(task.metadata, "low", 1), _number(task.metadata, "high", 15)
        guesses = _number(task.metadata, "guesses", 4)
        if low > high or guesses < 1:
            raise ValueError(f"metadata: low {low}, high {high}, guesses {guesses}: no range or no guess")
        self._range, self._left = range(low, high + 1), guesses
        self._secret = random.Random(task.seed).randint(low, high)
        return Observation()

    def step(self, turn: Turn) -> Observation:
        """Answers a guess."""
        number = _INTEGER.search(turn.content)
        guess = int(number[0]) if number and len(number[0]) <= _MAX_DIGITS else None
        self._left -= 1
        if guess == self._secret:
            return Observation(reward=1.0, done=True, correct=True)
        if guess not in self._range or self._left <= 0:
            return Observation(done=True, correct=False)
        answer = "wrong" if self._blind else "higher" if guess < self._secret else "lower"
        return Observation([user_message(answer)], correct=False)


def guess_number_blind() -> GuessNumber:
    """`guess-number-blind`: its answers say nothing."""
    return GuessNumber(blind=True)


def _number(metadata: dict[str, Any], name: str, default: int) -> int:
    value = metadata.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"metadata: {name} must be a whole number of at least 0, not {value!r}")
    return value
