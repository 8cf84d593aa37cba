"""A weighted sum of scores: its components, and which verifier decides correctness."""

import pytest

from megarl.rewards.base import Score
from megarl.rewards.composition import compose, correctness_term, unscored
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


ABSENT = Score(0.0, False, abstains=True)


@pytest.mark.parametrize("text, absent, reward, correct, lone", [
    ("a:f+b:f", ["a:f"], 2.0, True, None),  # Σ over the others, not renormalised, as in TRL
    ("3*a:f+0.5*b:f", ["a:f"], 1.0, True, None),
    ("a:f+0.5*b:f", ["b:f"], 0.25, False, None),
    ("a:f+b:f", ["a:f", "b:f"], 0.0, False, "a:f"),
    ("a:f", ["a:f"], 0.0, False, "a:f"),
    ("a:f+0*b:f", ["a:f"], 0.0, True, "a:f"),  # a term of weight 0 gives no reward
    ("a:f+format", ["a:f"], 1.0, False, None),  # a form tells not whether an answer is right
    ("a:f+model", ["a:f"], -0.5, False, None),
    ("0*a:f+cosine", ["a:f"], 0.0, False, "a:f"),
    ("a:f+0.2*truncated", ["a:f"], 0.0, False, "a:f"),
])  # fmt: skip
def test_a_term_that_abstains_leaves_the_reward_to_the_others(text, absent, reward, correct, lone):
    scores = {"a:f": Score(0.25, False), "b:f": Score(2.0, True), "format": SCORES["format"], "model": SCORES["model"]}
    scores |= dict.fromkeys(absent, ABSENT)
    terms = parse(text)
    columns = {name: [score] for name, score in scores.items() if name != "model"}
    assert unscored(terms, columns, 1) == [lone]
    if not {"cosine", "truncated"} & {term.name for term in terms}:
        found = compose(terms, scores)
        assert (found.reward, found.correct) == (reward, correct)
