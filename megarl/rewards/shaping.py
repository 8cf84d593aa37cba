"""Terms of --reward that look at the length of a response, its repetitions, or what the other terms gave it.

They need no verifier: the reward role computes them from the scores of the other terms. Plain numbers, not tensors: a
vectorized cosine may differ in its last bit with a number's place in the batch, which depends on the layout.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from megarl.rewards.base import Score
from megarl.rewards.composition import correctness_term
from megarl.rewards.expression import ADAPTIVE, COSINE, REPETITION, SHAPING, TRUNCATED, Term


class CosineValues(NamedTuple):
    """The rewards between which `cosine` moves: at no length and at the limit, and of a truncated response."""

    right_short: float
    right_long: float
    wrong_short: float
    wrong_long: float
    truncated: float


class Shaped(NamedTuple):
    """What the terms read of a response."""

    share: float  # its length as a share of the limit
    is_finished: bool
    tokens: Sequence[int] = ()  # that the policy wrote


def parse_cosine(text: str) -> CosineValues:
    """`"1,0.5,-1,-0.5,-1"` -> `CosineValues`. ValueError unless it is five finite numbers."""
    numbers = [float(item) for item in text.split(",")]
    if len(numbers) != len(CosineValues._fields) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{text!r} is not {len(CosineValues._fields)} finite numbers")
    return CosineValues._make(numbers)


def cosine_by_length(share: float, is_correct: bool, is_finished: bool, values: CosineValues) -> float:
    """From the value at no length to that at the limit along half a cosine (arXiv 2502.03373, eq. 1)."""
    if not is_finished:
        return values.truncated
    short, long = values[:2] if is_correct else values[2:4]
    return long + 0.5 * (short - long) * (1.0 + math.cos(math.pi * min(share, 1.0)))


def repeated_share(tokens: Sequence[int], n: int) -> float:
    """The share of the n-grams that occurred before (arXiv 2502.03373, appendix C.2); 0 of fewer than n tokens. N-grams
    have numbers: those of 2k tokens by the pair of their halves, so that time and memory hardly depend on n.
    """
    total = len(tokens) - n + 1
    if total < 1:
        return 0.0
    numbers, length = list(tokens), 1  # of the n-gram of `length` tokens at each position
    while length < n:
        shift = min(length, n - length)
        known: dict[tuple[int, int], int] = {}
        pairs = zip(numbers, numbers[shift:], strict=False)
        numbers, length = [known.setdefault(pair, len(known)) for pair in pairs], length + shift
    return 1.0 - len(set(numbers)) / total


def shaping_scores(
    terms: Sequence[Term],
    cosine: CosineValues,
    n: int,
    responses: Sequence[Shaped],
    others: dict[str, list[Score]],
    groups: Sequence[Sequence[int]],
) -> dict[str, list[Score]]:
    """Each shaping term's scores of the responses.

    Args:
        terms: of one expression.
        cosine: of `--reward-cosine`; `n`: of `--reward-ngram`.
        others: scores of the other terms by name.
        groups: positions of the responses to each prompt that count in its mean.
    """
    names = [term.name for term in terms if term.name in SHAPING]
    positions = range(len(responses))
    columns = dict(others)
    if COSINE in names:
        decides = others[correctness_term(terms)]
        shaped = [
            Score(cosine_by_length(r.share, score.correct, r.is_finished, cosine), score.correct)
            for r, score in zip(responses, decides, strict=True)
        ]
        columns[COSINE] = [
            Score(0.0, False, abstains=True) if score.abstains else own
            for own, score in zip(shaped, decides, strict=True)
        ]
    if REPETITION in names:
        columns[REPETITION] = [Score(0.0 - repeated_share(r.tokens, n), False) for r in responses]
    added = [(weight, columns[name]) for weight, name in terms if name not in (TRUNCATED, ADAPTIVE)]
    rewards = [math.fsum(weight * column[i].reward for weight, column in added) for i in positions]
    if TRUNCATED in names:
        lost = [0.0 if responses[i].is_finished else rewards[i] for i in positions]
        columns[TRUNCATED] = [Score(0.0 - reward, False) for reward in lost]
    if ADAPTIVE in names:
        means = [0.0] * len(responses)
        for group in groups:
            mean = math.fsum(rewards[i] for i in group) / max(len(group), 1)
            for i in group:
                means[i] = mean
        columns[ADAPTIVE] = [Score(0.0 - means[i] * min(responses[i].share, 1.0), False) for i in positions]
    return {name: columns[name] for name in names}
