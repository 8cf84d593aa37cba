"""Rewards: the built-in verifiers, plug-ins, the checks around them, and lazy imports."""

import functools
import json
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import numpy
import pytest
import torch

from megarl.flags.settings import Settings
from megarl.rewards.base import Sample, Score, Verifier, batched
from megarl.rewards.chosen_verifiers import Options, build_named_verifiers


def scored(verifier: Verifier, sample: Sample) -> Score:
    """The score of a sample. RuntimeError with the reason if it has none."""
    (outcome,) = verifier.outcomes([sample])
    if isinstance(outcome, str):
        raise RuntimeError(outcome)
    return outcome


def reward_of(name: str) -> Callable[[Sample], Score]:
    return functools.partial(scored, build_named_verifiers(Options.of(Settings()), [name])[name])


@pytest.mark.parametrize("response, finished, reward, extracted", [
    ("42", True, 1.0, "42"), (" 42\n", True, 1.0, "42"), ("42", False, 0.0, None), ("4 2", True, 0.0, "4 2"),
    ("", True, 0.0, None), (" ", True, 0.0, None), ("420", True, 0.0, "420"),
])  # fmt: skip
def test_exact_match(response, finished, reward, extracted):
    score = reward_of("exact-match")(Sample("6*7=", response, "42 ", finished=finished))
    assert score == Score(reward, bool(reward), {"exact_match": reward}, extracted)


def test_exact_match_without_an_answer_raises():
    with pytest.raises(RuntimeError, match="reward exact-match on prompt 'q': ValueError"):
        reward_of("exact-match")(Sample("q", "a"))


def sums_sample(response, finished=True, answer="15"):
    return Sample("7 + 8 =", response, answer, {"source_dataset": "chain_sum"}, finished)


def test_reasoning_gym_scores_with_the_task():
    reward = reward_of("reasoning-gym")
    assert reward(sums_sample(" 15 ")) == Score(1.0, True, {"reasoning_gym": 1.0}, "15")
    assert reward(sums_sample("+015.0")).correct
    assert reward(sums_sample("14")) == Score(0.0, False, {"reasoning_gym": 0.0}, "14")
    # The task pays by the share of the text that is the answer: rewarded, but not correct.
    assert reward(sums_sample("1500")) == Score(0.5, False, {"reasoning_gym": 0.5}, "1500")
    assert reward(sums_sample("15", finished=False)) == Score(0.0, False, {"reasoning_gym": 0.0})


def test_reasoning_gym_calls_nothing_correct_that_is_only_nearly_so():
    # A word's share of right letters is a sum of sixths here: 0.9999999999999999.
    word = Sample("Q", "redrooms", "redroo", {"source_dataset": "spell_backward"})
    score = reward_of("reasoning-gym")(word)
    assert 0.999 < score.reward < 1 and not score.correct


def test_reasoning_gym_reads_answer_tags():
    reward = reward_of("reasoning-gym")
    last = reward(sums_sample("so <answer>1</answer> no, <answer> 15\n</answer> done"))
    assert last.correct and last.extracted == "15"
    assert reward(sums_sample("15 <answer>14</answer>")) == Score(0.0, False, {"reasoning_gym": 0.0}, "14")
    assert not reward(sums_sample("<answer>15")).correct
    assert reward(sums_sample("15 <answer> </answer>")).extracted is None


def test_reasoning_gym_text_that_a_scorer_cannot_read_is_wrong():
    # This scorer calls int() on each factor.
    metadata = {"source_dataset": "prime_factorization", "number": 6, "factors": [2, 3]}
    reward = reward_of("reasoning-gym")
    assert reward(Sample("6", "2 × 3", "2 × 3", metadata)).correct
    assert reward(Sample("6", "two", "2 × 3", metadata)) == Score(0.0, False, {"reasoning_gym": 0.0}, "two")


def test_reasoning_gym_raises_where_the_entry_is_broken():
    # Not even the reference answer can be scored: the fault is not the policy's.
    metadata = {"source_dataset": "n_queens"}
    with pytest.raises(RuntimeError, match="reward reasoning-gym on prompt 'Q _': KeyError: 'valid_answers'"):
        reward_of("reasoning-gym")(Sample("Q _", "_ Q", "_ Q", metadata))
    with pytest.raises(RuntimeError, match="source_dataset"):
        reward_of("reasoning-gym")(Sample("6", "5", "5"))
    with pytest.raises(RuntimeError, match="no_such_task"):
        reward_of("reasoning-gym")(Sample("6", "5", "5", {"source_dataset": "no_such_task"}))


@pytest.mark.parametrize("result, message", [
    (math.nan, "reward is nan, not a finite number"), (-math.inf, "reward is -inf"),
    ("1", "returned str, not a Score or a number"), ({"points": 1.0}, "returned dict with 'points'"),
    ([1.0, 2.0], "returned list"), (10**400, "reward is inf"), (numpy.array([1.0, 2.0]), "returned ndarray"),
    (Decimal("sNaN"), "reward is nan"), (Score("1", True), "reward is '1'"),
    (Score(1.0, True, {"a": math.nan}), "a is nan"), (Score(1.0, True, {"a": 0.5}), "do not add up to 1.0"),
    (Score(1.0, True, extracted=5), "extracted is 5, neither a string nor None"),
])  # fmt: skip
def test_bad_results_name_verifier_and_prompt(result, message):
    reward = Verifier("mine", lambda sample: result)
    with pytest.raises(RuntimeError) as caught:
        scored(reward, Sample("x" * 200, "a"))
    assert str(caught.value).startswith(f"reward mine on prompt '{'x' * 77}...': ")
    assert message in str(caught.value)


@pytest.mark.parametrize("result, score", [
    (numpy.bool_(True), Score(1.0, True, extracted="a")),
    (numpy.float16(0.5), Score(0.5, False, extracted="a")),
    (numpy.array(1), Score(1.0, True, extracted="a")),
    (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), Score(0.5, False, extracted="a")),
    (torch.tensor([1.0]), Score(1.0, True, extracted="a")),
    (Decimal("0.25"), Score(0.25, False, extracted="a")),
    (Fraction(1, 2), Score(0.5, False, extracted="a")),
    ([1.0], Score(1.0, True, extracted="a")),
    (None, Score(0.0, False, abstains=True)),
    ([None], Score(0.0, False, abstains=True)),
    # verl's reward_score/math_dapo.py, its naive reward managers, and OpenRLHF's remote rewards
    ({"score": -1.0, "acc": False, "pred": "7"}, Score(-1.0, False, extracted="7")),
    ({"score": 0.0, "acc": True}, Score(0.0, True, extracted="a")),
    ({"rewards": torch.tensor([0.5]), "extra_logs": {}}, Score(0.5, False, extracted="a")),
])  # fmt: skip
def test_what_published_rewards_return_is_read(result, score):
    assert scored(Verifier("mine", lambda sample: result), Sample("q", "a")) == score


@pytest.mark.parametrize("results", [
    [0.5, None], (numpy.float32(0.5), None), numpy.array([0.5, 2.0]), torch.tensor([[0.5], [2.0]]),
    {"rewards": torch.tensor([0.5, 2.0]), "extra_logs": {}},
])  # fmt: skip
def test_what_published_rewards_of_a_list_return_is_read(results):
    verifier = Verifier("mine", batched(lambda samples: results))
    first, second = verifier.outcomes([Sample("q", "a"), Sample("q", "b")])
    assert first == Score(0.5, False, extracted="a") and (second.abstains or second.reward == 2.0)


def test_an_exception_in_a_verifier_is_the_reason():
    def fails(sample):
        raise KeyError("size")

    with pytest.raises(RuntimeError, match="reward mine on prompt 'q': KeyError: 'size'"):
        scored(Verifier("mine", fails), Sample("q", "a"))


def test_numpy_numbers_become_floats():
    reward = Verifier("mine", lambda sample: Score(numpy.float32(0.5), numpy.bool_(True), {"a": numpy.float32(0.5)}))
    result = scored(reward, Sample("q", "a"))
    assert (type(result.reward), type(result.correct), type(result.parts["a"])) == (float, bool, float)
    assert json.loads(json.dumps(result.parts)) == {"a": 0.5}


class Unreadable:
    """An object of a user whose methods fail in ways of their own."""

    def __repr__(self):
        raise KeyError("repr")

    def item(self):
        raise KeyError("item")


def nested(wrap: Callable, depth: int = 5000):
    value = 1.0
    for _ in range(depth):
        value = wrap(value)
    return value


HUGE = 10**5000  # `repr` of it raises, and no float holds it
RESULTS = {
    "huge": HUGE, "huge score": Score(HUGE, True), "huge part": Score(1.0, True, {"a": HUGE}),
    "huge answer": Score(1.0, True, extracted=HUGE), "huge fraction": Fraction(HUGE, 3),
    "decimal without end": Decimal("1e999999"), "parts of too large a sum": Score(1.0, True, {"a": 1e308, "b": 1e308}),
    "deep objects": nested(lambda value: {"score": value}), "deep lists": nested(lambda value: [value]),
    "deep lists of objects": nested(lambda value: [{"reward": value}]), "unreadable": Unreadable(),
    "unreadable reward": Score(Unreadable(), True), "unreadable part": Score(1.0, True, {"a": Unreadable()}),
    "unreadable name": Score(1.0, True, {Unreadable(): 1.0}), "unreadable parts": Score(1.0, True, [Unreadable()]),
    "unreadable key": {Unreadable(): 1}, "long name": Score(1.0, True, {"k" * 10**6: 2.0}), "long text": "x" * 10**6,
}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_whatever_a_function_returns_is_a_failure_of_one_short_line(name):
    (outcome,) = Verifier("mine", lambda sample: RESULTS[name]).outcomes([Sample("p", "r")])
    assert isinstance(outcome, str) and outcome.startswith("reward mine on prompt 'p': ")
    assert len(outcome) < 3000 and "\n" not in outcome


def test_an_exception_without_a_text_is_a_failure():
    class Mute(Exception):
        def __str__(self):
            raise KeyError("str")

    def fail(sample):
        raise Mute

    (outcome,) = Verifier("mine", fail).outcomes([Sample("p", "r")])
    assert "Mute" in outcome
