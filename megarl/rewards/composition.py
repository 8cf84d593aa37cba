"""Combines the scores of all terms of --reward into one weighted sum; and the terms that are computed from the others'
scores, a response's length and its repetitions.

These need no verifier: the reward role computes them. Plain numbers, not tensors: a vectorized cosine may differ in its
last bit with a number's place in the batch, which depends on the layout.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from megarl.rewards.base import Sample, Score, ScoringError, failure
from megarl.rewards.expression import (
    ADAPTIVE,
    COSINE,
    ENVIRONMENT,
    FORMS,
    JUDGE,
    MODEL,
    REPETITION,
    SHAPING,
    TRUNCATED,
    Term,
)

_ABSENT = "returned None, and no other term of the reward has a score for this sample"


def correctness_term(terms: Sequence[Term]) -> str:
    """The term that decides whether a response is correct. It is the environment, else the first answer verifier, else
    the reward model or the judge, else the first term. For a reward model, a score above 0 is correct, because
    train_reward centres its scores at 0.
    """
    names = [term.name for term in terms]
    if ENVIRONMENT in names:
        return ENVIRONMENT
    answers = [name for name in names if name not in (MODEL, JUDGE, *FORMS)]
    return (answers or [name for name in names if name in (MODEL, JUDGE)] or names)[0]


def compose(terms: Sequence[Term], scores: dict[str, Score]) -> Score:
    """The sum Σ weight · reward of one sample's scores by name, with each term's share of it as a component. A single
    verifier of weight 1 keeps its score and its components. Terms of weight 0 have no component, nor those that
    abstain. Without terms the reward is 0.
    """
    if not terms:
        return Score(reward=0.0, correct=False)
    if len(terms) == 1 and terms[0].weight == 1.0 and terms[0].name != MODEL:
        return scores[terms[0].name]
    parts: dict[str, float] = {}
    for weight, name in terms:
        if weight == 0.0 or scores[name].abstains:
            continue
        shares = scores[name].parts
        if len(shares) > 1:
            parts |= {f"{name}/{part}": weight * value for part, value in shares.items()}
        else:
            parts[name] = weight * scores[name].reward
    correctness = deciding_score(terms, scores)
    return Score(sum(parts.values()), correctness.correct, parts, extracted=correctness.extracted)


def deciding_score(terms: Sequence[Term], scores: dict[str, Score]) -> Score:
    """The score that says whether one sample is correct: of terms that abstain the next one that can tell. If none is
    left, the sample is not correct, and the score abstains.
    """
    found = scores[correctness_term(terms)]
    if not found.abstains:
        return found
    others = [term for term in terms if not scores[term.name].abstains and term.name not in FORMS] if terms else []
    return scores[correctness_term(others)] if others else found


def unscored(terms: Sequence[Term], columns: dict[str, list[Score]], count: int) -> list[str | None]:
    """For each of `count` samples the first term that abstains, if no term that counts has a score for it; else None.
    `columns`: scores of the terms that can abstain. `cosine` abstains with the term that says which samples are
    correct; `truncated` and `adaptive-length` only change what the others give.
    """
    counting = [term.name for term in terms if term.weight and term.name not in (TRUNCATED, ADAPTIVE)]
    names = list(dict.fromkeys(correctness_term(terms) if name == COSINE else name for name in counting))
    if not all(name in columns for name in names):
        return [None] * count
    rows = [[columns[name][i].abstains for name in names] for i in range(count)]
    return [names[0] if row and all(row) else None for row in rows]


def fail_unscored(
    terms: Sequence[Term],
    samples: Sequence[Sample],
    columns: dict[str, list[Score]],
    failures: dict[str, list[str]],
    reasons: Sequence[str | None],
    fallback: float,
) -> tuple[dict[str, list[str]], list[str | None]]:
    """(failures by name, reasons by sample), with those of the `unscored` samples. The first term that abstains gets
    the score `fallback` there, in `columns`.
    """
    failures, reasons = {name: list(found) for name, found in failures.items()}, list(reasons)
    for i, name in enumerate(unscored(terms, columns, len(samples))):
        if name is None:
            continue
        columns[name][i] = Score(fallback, False)
        reason = failure(name, samples[i], ScoringError(_ABSENT))
        failures[name].append(reason)
        reasons[i] = reasons[i] or reason
    return failures, reasons


class Shaped(NamedTuple):
    """What the terms read of a response."""

    share: float  # its length as a share of the limit
    is_finished: bool
    tokens: Sequence[int] = ()  # that the policy wrote


def parse_cosine(text: str) -> tuple[float, ...]:
    """`"1,0.5,-1,-0.5,-1"` -> the rewards between which `cosine` moves: of a right response at no length and at the
    limit, of a wrong one at both, of a truncated one. ValueError unless it is five finite numbers."""
    numbers = tuple(float(item) for item in text.split(","))
    if len(numbers) != 5 or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{text!r} is not 5 finite numbers")
    return numbers


def cosine_by_length(share: float, is_correct: bool, is_finished: bool, values: tuple[float, ...]) -> float:
    """From the value at no length to that at the limit along half a cosine (arXiv 2502.03373, eq. 1)."""
    *of_finished, truncated = values
    if not is_finished:
        return truncated
    short, long = of_finished[:2] if is_correct else of_finished[2:]
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
    cosine: tuple[float, ...],
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
