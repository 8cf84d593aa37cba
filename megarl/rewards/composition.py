"""One score of several: a weighted sum of verifiers' scores and a reward model's."""

from collections.abc import Sequence

from megarl.rewards.base import Score
from megarl.rewards.expression import MODEL, Term

FORMS = ("format", "length")  # of the text; whether an answer is right they cannot tell


def correctness_term(terms: Sequence[Term]) -> str:
    """The term that says whether a response is correct: the first verifier of answers, else the model, else the first.

    A model calls a response correct whose score is above 0, where train_reward centres its scores.
    """
    names = [term.name for term in terms]
    answers = [name for name in names if name not in (MODEL, *FORMS)]
    return (answers or [name for name in names if name == MODEL] or names)[0]


def compose(terms: Sequence[Term], scores: dict[str, Score]) -> Score:
    """The sum Σ weight · reward of one sample's scores by name; parts are what each term adds to it.

    A single verifier of weight 1 keeps its score, parts included. Terms of weight 0 add nothing and have no part.
    """
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
    return Score(sum(parts.values()), correctness.correct, parts, correctness.extracted)
