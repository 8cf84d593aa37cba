"""A weighted sum of scores: its components, and which verifier decides correctness."""

import pytest

from megarl.rewards.base import Score
from megarl.rewards.composition import compose, correctness_term
from megarl.rewards.expression import parse

SCORES = {
    "model": Score(-0.5, False),
    "exact-match": Score(1.0, True, {"exact_match": 1.0}, "42"),
    "format": Score(1.0, True, {"format": 1.0}),
    "environment": Score(2.0, False),
    "m:f": Score(0.5, False, {"style": 0.2, "facts": 0.3}, "41"),
}


@pytest.mark.parametrize("text, parts, correct, extracted", [
    ("model+0.2*format", {"model": -0.5, "format": 0.2}, False, None),
    ("2*model+0*exact-match", {"model": -1.0}, True, "42"),
    ("format+-1*exact-match", {"format": 1.0, "exact-match": -1.0}, True, "42"),
    ("2*m:f+exact-match", {"m:f/style": 0.4, "m:f/facts": 0.6, "exact-match": 1.0}, False, "41"),
    ("0.5*exact-match", {"exact-match": 0.5}, True, "42"),
    ("model", {"model": -0.5}, False, None),
    ("exact-match+0.5*environment", {"exact-match": 1.0, "environment": 1.0}, False, None),
])  # fmt: skip
def test_the_sum_its_components_and_the_correctness(text, parts, correct, extracted):
    score = compose(parse(text), SCORES)
    assert score.parts == parts and score.reward == pytest.approx(sum(parts.values()))
    assert (score.correct, score.extracted) == (correct, extracted)


@pytest.mark.parametrize("name", ["m:f", "environment"])
def test_a_verifier_or_an_environment_alone_keeps_its_score(name):
    assert compose(parse(name), SCORES) is SCORES[name]


@pytest.mark.parametrize("text, name", [
    ("format+model+math-verify", "math-verify"), ("math-verify+model+0*environment", "environment"),
    ("length+model", "model"), ("length+format", "length"),
])  # fmt: skip
def test_correctness_comes_from_environments_then_answer_verifiers_then_models_then_formats(text, name):
    assert correctness_term(parse(text)) == name
