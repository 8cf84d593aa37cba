"""Combines the scores of all terms of --reward into one weighted sum."""

from collections.abc import Sequence

from megarl.rewards.base import Sample, Score, ScoringError, failure
from megarl.rewards.expression import ADAPTIVE, COSINE, ENVIRONMENT, FORMS, JUDGE, MODEL, TRUNCATED, Term

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
