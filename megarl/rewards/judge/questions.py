"""Which responses a judge reads together: one, the two of a pair in both orders, or a group in several orders."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from megarl.rewards.judge.config import JudgeConfig


class JudgeQuestion(NamedTuple):
    """One thing to judge. `members`: positions of its responses, in the order in which the judge reads them.

    `stream`: the same number for the same question in every layout; `sample`: which of its judgements.
    """

    members: tuple[int, ...]
    stream: int
    sample: int


def questions_of(
    config: JudgeConfig, sequence_ids: Sequence[int], groups: Sequence[Sequence[int]]
) -> list[JudgeQuestion]:
    """The questions about a replica's responses. `sequence_ids`: ascending numbers of the responses in the step.
    `groups`: positions of the responses to each prompt, in order; read where responses are judged together.
    """
    samples = range(config.samples)
    if config.mode == "group":
        return [JudgeQuestion(_rotated(group, n), sequence_ids[group[0]], n) for group in groups for n in samples]
    if config.mode == "single":
        return [JudgeQuestion((i,), number, n) for i, number in enumerate(sequence_ids) for n in samples]
    pairs = [pair for group in groups for pair in _pairs(group, config.pairs)]
    ordered = [order for one, other in pairs for order in ((one, other), (other, one))]
    streams = [sequence_ids[one] << 21 | sequence_ids[other] for one, other in ordered]
    return [JudgeQuestion(order, stream, n) for order, stream in zip(ordered, streams, strict=True) for n in samples]


def judgements_of_group(config: JudgeConfig, size: int) -> int:
    """The most judgements of a group of so many responses, with all retries."""
    return len(questions_of(config, range(size), [range(size)])) * (1 + config.retries)


def _pairs(group: Sequence[int], pairs: str) -> list[tuple[int, int]]:
    return list(combinations(group, 2)) if pairs == "all" else [(group[0], other) for other in group[1:]]


def _rotated(group: Sequence[int], count: int) -> tuple[int, ...]:
    """The group from another member on, so that no response is always the first."""
    start = count % len(group)
    return (*group[start:], *group[:start])


def order_agreement(questions: Sequence[JudgeQuestion], numbers: Sequence[Sequence[float] | None]) -> tuple[int, int]:
    """(pairs that have the same winner, or none, in both orders; pairs with numbers in both), samples apart. `numbers`:
    those of the members of each question; None: it has none.
    """
    shares = {
        (*question.members, question.sample): found[0]
        for question, found in zip(questions, numbers, strict=True)
        if found is not None
    }
    both = [
        (share, 1 - shares[other, one, sample])
        for (one, other, sample), share in shares.items()
        if one < other and (other, one, sample) in shares
    ]
    return sum(_winner(one) == _winner(other) for one, other in both), len(both)


def _winner(share: float) -> int:
    return (share > 0.5) - (share < 0.5)
