"""Flags of how difficult a prompt may be: pools by the latest group, and groups that the batch takes."""

import dataclasses
import math

from megarl.flags.fields import flag, not_negative, parses

MIN_WEIGHT = 0.01  # of a pool that is not left out, as a share of the largest


def parse_bounds(text: str) -> tuple[float, float]:
    """`"0.1,0.9"` -> (0.1, 0.9). ValueError unless it is two finite numbers, the first below the second."""
    low, high = (float(item) for item in text.split(","))
    if not -math.inf < low < high < math.inf:
        raise ValueError(text)
    return low, high


def parse_shares(text: str) -> tuple[float, float]:
    """As `parse_bounds`, of numbers from 0 to 1."""
    low, high = parse_bounds(text)
    if low < 0 or high > 1:
        raise ValueError(text)
    return low, high


def parse_weights(text: str) -> tuple[float, float, float]:
    """`"0.5,1,0"` -> how often a prompt of each pool is drawn, as a share of the most frequent. ValueError."""
    hard, normal, easy = (float(item) for item in text.split(","))
    most = max(hard, normal, easy)
    if not 0 < most < math.inf or not all(n == 0 or n >= MIN_WEIGHT * most for n in (hard, normal, easy)) or not normal:
        raise ValueError(text)
    return hard / most, normal / most, easy / most


@dataclasses.dataclass(frozen=True)
class PoolSettings:
    """Difficulty pools."""

    pool_bounds: str | None = flag(None, "draw prompts by their difficulty, LOW,HIGH: a prompt is hard if at most the"
                                    " share LOW of its latest group was correct, easy if at least HIGH was; default:"
                                    " no pools", parses(parse_shares), "two numbers from 0 to 1, the first below the"
                                    " second")  # fmt: skip
    pool_weights: str = flag("0.5,1,0.25", "how often hard, normal and easy prompts are drawn, as HARD,NORMAL,EASY; 0"
                              " leaves a pool out", parses(parse_weights), "three numbers with commas, NORMAL above 0,"
                              " each 0 or at least a hundredth of the largest", when="pools")  # fmt: skip
    pool_retire_after: int = not_negative(0, "leave a prompt out for good after this many hard groups in a row; 0:"
                                           " never", when="pools")  # fmt: skip
    group_filter_range: str = flag("0,1", "means of the rewards that --group-filter range keeps, LOW,HIGH,"
                                    " between the two", parses(parse_bounds), "two numbers, the first below the second",
                                    when="range")  # fmt: skip
