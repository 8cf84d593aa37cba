"""Whole numbers as text for people: runs of consecutive ones as ranges."""

from collections.abc import Iterable


def ranges_text(numbers: Iterable[int]) -> str:
    """`1-3,5` of the numbers 1, 2, 3, 5, in any order."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
