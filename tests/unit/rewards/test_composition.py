"""A weighted sum of scores: its components, and which verifier decides correctness."""

import math
import random
import tracemalloc

import pytest

from megarl.rewards.base import Score
from megarl.rewards.composition import (
    Shaped,
    compose,
    correctness_term,
    cosine_by_length,
    parse_cosine,
    repeated_share,
    shaping_scores,
    unscored,
)
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


VALUES = (1.0, 0.5, -1.0, -0.5, -2.0)
LENGTHS, LIMIT = [0, 1, 10, 20, 33, 40, 55], 40
COSINES = [1.0, 0.999229333433282, 0.9267766952966369, 0.75, 0.536839958911477, 0.5, 0.5]  # of a right answer
ROWS = [[1, 2, 3, 4], [5] * 5, [1, 2, 1, 2, 1, 2, 3], [], [7], [1, 2, 3] * 4]
REPETITIONS = {  # length of the n-grams -> of each row
    1: [0.0, -0.8, -0.5714285714285714, 0.0, 0.0, -0.75],
    2: [0.0, -0.75, -0.5, 0.0, 0.0, -0.7272727272727273],
    3: [0.0, -0.6666666666666667, -0.4, 0.0, 0.0, -0.7],
}


def shaped(text: str, responses: list[Shaped], others: dict[str, list[float]], groups=(), n: int = 1) -> list[float]:
    """The rewards of the responses; another term's score above 0 is a correct response."""
    terms = parse(text)
    columns = {name: [Score(value, value > 0) for value in column] for name, column in others.items()}
    columns |= shaping_scores(terms, VALUES, n, responses, columns, groups)
    return [compose(terms, {name: column[i] for name, column in columns.items()}).reward for i in range(len(responses))]


def test_cosines_are_those_of_trl():
    found = [[cosine_by_length(length / LIMIT, right, True, VALUES) for length in LENGTHS] for right in (True, False)]
    assert found == [COSINES, [-value for value in COSINES]]
    assert [cosine_by_length(1.0, right, False, VALUES) for right in (True, False)] == [-2.0, -2.0]


@pytest.mark.parametrize("n", REPETITIONS)
def test_repetitions_are_those_of_trl(n):
    assert [0.0 - repeated_share(row, n) for row in ROWS] == REPETITIONS[n]


def test_long_n_grams_are_those_of_tuples_and_cost_no_more():
    draw = random.Random(3)
    for _ in range(200):
        row, n = [draw.randrange(3) for _ in range(draw.randrange(60))], draw.randrange(1, 20)
        grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
        assert repeated_share(row, n) == (1.0 - len(set(grams)) / len(grams) if grams else 0.0)
    tracemalloc.start()
    assert repeated_share(list(range(20_000)), 10_000) == 0.0  # as tuples: 800 MB
    assert tracemalloc.get_traced_memory()[1] < 2e7
    tracemalloc.stop()


def test_a_verifier_of_weight_0_decides_which_cosine_a_response_gets():
    responses = [Shaped(0.5, True), Shaped(0.5, True), Shaped(1.0, False)]
    assert shaped("0*exact-match+2*cosine", responses, {"exact-match": [1.0, 0.0, 0.0]}) == [1.5, -1.5, -4.0]


def test_the_cosine_judges_nothing_that_its_verifier_leaves_out():
    others = {"exact-match": [Score(1.0, True), Score(0.0, False, abstains=True)]}
    terms = parse("exact-match+cosine")
    found = shaping_scores(terms, VALUES, 2, [Shaped(0.5, True)] * 2, others, groups=[[0, 1]])["cosine"]
    assert [score.abstains for score in found] == [False, True] and found[1].reward == 0.0


def test_a_truncated_response_keeps_a_share_of_its_reward():
    responses = [Shaped(1.0, False), Shaped(0.5, True), Shaped(1.0, False, [4, 4])]
    found = shaped("2*model+0.5*repetition+0.75*truncated", responses, {"model": [1.0, 1.0, -1.0]})
    assert found == [0.5, 2.0, 0.25 * (-2.0 - 0.25)]


def test_length_costs_more_where_a_group_has_more_reward():
    responses = [Shaped(0.5, True), Shaped(0.25, True), Shaped(1.0, False), Shaped(0.5, True), Shaped(0.5, True)]
    model = [1.0, 0.0, 0.0, 1.0, 5.0]
    found = shaped("model+0.5*adaptive-length", responses, {"model": model}, groups=[[0, 1, 2], [3]])
    third = math.fsum([1.0, 0.0, 0.0]) / 3
    assert found == [1.0 - 0.25 * third, -0.125 * third, -0.5 * third, 0.75, 5.0]  # the last counts in no group


@pytest.mark.parametrize("text", ["1,2,3,4", "1,2,3,4,nan", "1,2,3,4,x", "", "1,2,3,4,5,6"])
def test_five_numbers_are_needed(text):
    with pytest.raises(ValueError):
        parse_cosine(text)
