"""Shaping terms: numbers of TRL 1.16.0, the reward of a truncated response, the price of length by a group's mean."""

import math
import random
import tracemalloc

import pytest

from megarl.rewards.base import Score
from megarl.rewards.composition import compose
from megarl.rewards.expression import parse
from megarl.rewards.shaping import CosineValues, Shaped, cosine_by_length, parse_cosine, repeated_share, shaping_scores

VALUES = CosineValues(1.0, 0.5, -1.0, -0.5, -2.0)
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
