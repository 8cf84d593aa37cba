"""Group advantages: against verl, plain loops and closed forms; exact zeros; independent of the responses' order."""

import functools
import math

import pytest
import torch

from megarl.algorithms.group_advantages import best_of_group, centred, grpo, maxrl, opo, rloo
from tests.references.ragged import ragged_steps
from tests.references.verl_core_algos import load_verl

CLOSE = dict(rtol=1e-9, atol=1e-7)  # below the 1e-6 that is promised; scores go up to 1e6


def verl_outcome(function, step, **options):
    """[N]: the advantage that one of verl's outcome estimators gives each response, read at one of its tokens."""
    width = max(step.batch.lengths)
    rewards = torch.zeros(len(step.groups), width, dtype=torch.float64)
    rewards[:, -1] = step.scores
    return function(rewards, torch.ones_like(rewards), step.labels, **options)[0][:, 0]


def by_group(step, function):
    """[N]: a plain loop that applies a function to the members of each group."""
    result = [0.0] * len(step.groups)
    for group in set(step.groups.tolist()):
        members = [i for i, other in enumerate(step.groups.tolist()) if other == group]
        if len(members) > 1:
            for place, number in zip(members, function(members), strict=True):
                result[place] = number
    return torch.tensor(result, dtype=torch.float64)


def test_maxrl_and_the_best_of_a_group_equal_plain_loops():
    for step in ragged_steps(lone=True):
        scores = step.scores.tolist()

        def by_mean(members):
            own = [scores[i] for i in members]
            mean = math.fsum(own) / len(own)
            return [(score - mean) / mean if mean > 0 and min(own) < max(own) else 0.0 for score in own]

        def beyond_others(members):
            others = {i: max(scores[j] for j in members if j != i) for i in members}
            return [max(0.0, scores[i] - others[i]) for i in members]

        torch.testing.assert_close(maxrl(step.scores, step.groups), by_group(step, by_mean), **CLOSE)
        best = best_of_group(step.scores, step.groups, std=False)
        torch.testing.assert_close(best, by_group(step, beyond_others), **CLOSE)


@pytest.mark.parametrize("std", [True, False])
def test_grpo_equals_verl(std):
    verl = load_verl().core_algos
    for step in ragged_steps(lone=True):
        theirs = verl_outcome(verl.compute_grpo_outcome_advantage, step, norm_adv_by_std_in_grpo=std)
        # verl sets mean 0 and deviation 1 for a group of one.
        theirs = torch.where(step.sizes > 1, theirs, 0.0)
        torch.testing.assert_close(grpo(step.scores, step.groups, std), theirs, **CLOSE)
        assert std or torch.equal(grpo(step.scores, step.groups, std), centred(step.scores, step.groups))


def test_rloo_equals_verl():
    verl = load_verl().core_algos
    for step in ragged_steps(lone=True):
        scores, groups = step.scores, step.groups
        # The baseline of a group of one is 0 in verl.
        theirs = torch.where(step.sizes > 1, verl_outcome(verl.compute_rloo_outcome_advantage, step), 0.0)
        torch.testing.assert_close(rloo(scores, groups), theirs, **CLOSE)
        # The vectorised form of verl gives a group of one 0, as this project does.
        theirs = verl_outcome(verl.compute_rloo_vectorized_outcome_advantage, step)
        torch.testing.assert_close(rloo(scores, groups), theirs, **CLOSE)


def test_opo_equals_verl():
    opo_of_verl, compared = load_verl().core_algos.compute_opo_outcome_advantage, 0
    for step in ragged_steps(lone=True):
        mask = step.batch.padded(step.batch.mask).double()
        lengths = mask.sum(1).long()
        rewards = torch.zeros_like(mask)
        rewards[:, -1] = step.scores
        theirs = torch.where(step.sizes[:, None] > 1, opo_of_verl(rewards, mask, step.labels)[0], 0.0)
        ours = opo(step.scores, step.groups, lengths)[:, None] * mask
        torch.testing.assert_close(ours[lengths > 0], theirs[lengths > 0], **CLOSE)
        compared += int((lengths > 0).any())
    assert compared >= 115


def every_estimator(scores, groups, lengths):
    return [centred(scores, groups), grpo(scores, groups), grpo(scores, groups, std=False), rloo(scores, groups),
            opo(scores, groups, lengths)]  # fmt: skip


def test_equal_scores_and_groups_of_one_give_exactly_zero():
    awkward = [0.1, 1 / 3, -1e30, 1e-300, 123456.789, 0.0]
    for value in awkward:
        for size in range(1, 60):
            scores = torch.full((size,), value, dtype=torch.float64)
            lengths = torch.arange(size) * 7 + 1
            for result in every_estimator(scores, torch.zeros(size, dtype=torch.int64), lengths):
                assert torch.equal(result, torch.zeros_like(scores)), (value, size)
    scores = torch.tensor(awkward, dtype=torch.float64)
    for result in every_estimator(scores, torch.arange(6), torch.ones(6)):
        assert torch.equal(result, torch.zeros_like(scores))


def test_bits_do_not_depend_on_the_order_of_responses_or_the_numbers_of_groups():
    for step in ragged_steps(lone=True):
        generator, number = step.batch.generator, len(step.groups)
        lengths = torch.randint(0, 50, (number,), generator=generator)
        order = torch.randperm(number, generator=generator)
        renamed = torch.randperm(number + 5, generator=generator)[step.groups]
        here = every_estimator(step.scores, step.groups, lengths)
        there = every_estimator(step.scores[order], renamed[order], lengths[order])
        for one, other in zip(here, there, strict=True):
            assert torch.equal(one[order], other)


def test_closed_forms():
    scores = torch.tensor([1.0, 5.0, 0.0, 7.0, 2.0, 3.0], dtype=torch.float64)
    groups = torch.tensor([2, 0, 2, 4, 2, 0])  # prompts 1 and 3 have no response, prompt 4 has one
    assert centred(scores, groups).tolist() == [0.0, 1.0, -1.0, 0.0, 1.0, -1.0]
    assert rloo(scores, groups).tolist() == [0.0, 2.0, -1.5, 0.0, 1.5, -2.0]
    of_two, of_three = 1 / (2**0.5 + 1e-6), 1 / (1 + 1e-6)
    assert grpo(scores, groups).tolist() == pytest.approx([0, of_two, -of_three, 0, of_three, -of_two], rel=1e-12)
    lengths = torch.tensor([1, 10, 2, 5, 1, 30])
    assert opo(scores, groups, lengths).tolist() == [0.25, 1.5, -0.75, 0.0, 1.25, -0.5]
    assert opo(scores, groups, torch.zeros(6)).tolist() == [0.0] * 6
    # Only the nudge of 2^-40 is a difference, and it is seen.
    near = torch.tensor([1.0, 1.0 + 2.0**-40], dtype=torch.float64)
    assert centred(near, torch.zeros(2, dtype=torch.int64)).tolist() == [-(2.0**-41), 2.0**-41]


@pytest.mark.parametrize("function", [centred, grpo, rloo, functools.partial(opo, response_lengths=torch.ones(0))])
def test_no_response_at_all(function):
    assert function(torch.zeros(0).double(), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_not_a_number_stays_in_its_group():
    scores = torch.tensor([float("nan"), 1.0, 1.0, 3.0], dtype=torch.float64)
    result = grpo(scores, torch.tensor([0, 0, 1, 1]))
    assert result.isnan().tolist() == [True, True, False, False]


def test_wrong_arguments_are_rejected():
    scores, groups = torch.ones(3), torch.zeros(3, dtype=torch.int64)
    for function in (centred, grpo, rloo):
        with pytest.raises(ValueError, match=r"must both be \[S\], got \[3\] and \[2\]"):
            function(scores, groups[:2])
    with pytest.raises(ValueError, match=r"response_lengths must be \[3\], got \[2\]"):
        opo(scores, groups, groups[:2])
