"""Combines the scores of all terms of --reward into one weighted sum."""

from collections.abc import Sequence

from megarl.rewards.base import Score
from megarl.rewards.expression import ENVIRONMENT, FORMS, JUDGE, MODEL, Term


def correctness_term(terms: Sequence[Term]) -> str:
    """The term that decides whether a response is correct.

    It is the environment, else the first answer verifier, else the reward model or the judge, else the first term. For
    a reward model, a score above 0 is correct, because train_reward centres its scores at 0.
    """
    names = [term.name for term in terms]
    if ENVIRONMENT in names:
        return ENVIRONMENT
    answers = [name for name in names if name not in (MODEL, JUDGE, *FORMS)]
    return (answers or [name for name in names if name in (MODEL, JUDGE)] or names)[0]


def compose(terms: Sequence[Term], scores: dict[str, Score]) -> Score:
    """The sum Σ weight · reward of one sample's scores by name, with each term's share of it as a component.

    A single verifier of weight 1 keeps its score and its components. Terms of weight 0 have no component. Without terms
    the reward is 0.
    """
    if not terms:
        return Score(reward=0.0, correct=False)
    if len(terms) == 1 and terms[0].weight == 1.0 and terms[0].name != MODEL:
        return scores[terms[0].name]
    parts: dict[str, float] = {}
    for weight, name in terms:
        if weight == 0.0:
            continue
        shares = scores[name].parts
        if len(shares) > 1:
            parts |= {f"{name}/{part}": weight * value for part, value in shares.items()}
        else:
            parts[name] = weight * scores[name].reward
    correctness = scores[correctness_term(terms)]
    return Score(sum(parts.values()), correctness.correct, parts, extracted=correctness.extracted)
