"""Replicas with even shares of the work of each mini-batch, and with whole groups where that is possible."""

import pytest
import torch

from megarl.comm import microbatches as mb
from megarl.comm.load_balance import balance_by_flops, positions_by_group, with_whole_groups
from megarl.groups import PromptGroups

HIDDEN = 64


def ragged(seed: int, count: int) -> torch.Tensor:
    """Lengths from 1 up."""
    return torch.randint(1, 13, (count,), generator=torch.Generator().manual_seed(seed))


def work_of_replicas(lengths, dp_assignment, ids, count) -> torch.Tensor:
    work = torch.zeros(count, dtype=torch.int64)
    return work.index_add_(0, dp_assignment[ids], mb.sequence_flops(lengths, HIDDEN)[ids]).double()


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_each_minibatch_and_the_step_are_shared_out_evenly(count):
    lengths = (5 + 0.7 * torch.randn(256, generator=torch.Generator().manual_seed(1))).exp().long().clamp(1, 2000)
    minibatches = mb.minibatch_ids(256, 64, 1, 1, 0)
    dp_assignment = balance_by_flops(lengths, minibatches, count, HIDDEN)
    assert dp_assignment.dtype == torch.int64 and dp_assignment.min() >= 0 and dp_assignment.max() < count
    for ids in [*minibatches, torch.arange(256)]:
        work = work_of_replicas(lengths, dp_assignment, ids, count)
        assert work.max() < 1.15 * work.mean()
    in_turn = work_of_replicas(lengths, torch.arange(256) // 4 % count, torch.arange(256), count)
    assert count == 1 or work.max() < in_turn.max()


def test_minibatches_smaller_than_the_replicas_rotate():
    dp_assignment = balance_by_flops(torch.full((8,), 5), [torch.tensor([i]) for i in range(8)], 4, HIDDEN)
    assert sorted(dp_assignment.tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("groups, is_whole", [(8, True), (7, False)])
def test_replicas_get_whole_groups_if_there_are_enough(groups, is_whole):
    """Two replicas; of fewer groups than four for each, the work is not shared out evenly enough."""
    lengths = ragged(7, 2 * groups * 4).add(20)
    of_step = PromptGroups.equal(2 * groups, 4)
    minibatches = [of_step.ids_of(drawn) for drawn in mb.minibatch_ids(2 * groups, groups, 1, 1, 0)]
    dp_assignment = balance_by_flops(lengths, minibatches, 2, HIDDEN, of_step)
    by_group = dp_assignment.view(-1, 4)
    assert bool((by_group == by_group[:, :1]).all()) == is_whole
    for ids in [*minibatches, torch.arange(len(lengths))]:
        work = work_of_replicas(lengths, dp_assignment, ids, 2)
        assert work.max() < 1.15 * work.mean()
    if not is_whole:
        assert torch.equal(dp_assignment, balance_by_flops(lengths, minibatches, 2, HIDDEN))


@pytest.mark.parametrize("groups, replicas", [(1, 1), (1, 3), (3, 2), (8, 2), (5, 4)])
def test_whole_groups_meet_on_one_replica(groups, replicas):
    lengths = ragged(7, groups * 4).add(20)
    split = balance_by_flops(lengths, [torch.arange(groups * 4)], replicas, HIDDEN)
    found = with_whole_groups(split, lengths, PromptGroups.equal(groups, 4), replicas, HIDDEN)
    by_group = found.view(-1, 4)
    assert bool((by_group == by_group[:, :1]).all())
    assert replicas == 1 or not torch.equal(split, found), "there was something to bring together"
    counts = by_group[:, 0].bincount(minlength=replicas)
    assert (
        counts.max() - counts.min() <= 1
        and with_whole_groups(found, lengths, PromptGroups.equal(groups, 4), replicas, HIDDEN) is found
    )


def test_positions_by_group():
    """Of three samples each: a group of which one is missing, groups that another replica has, a whole one."""
    assert positions_by_group([0, 2, 9, 10, 11], PromptGroups.equal(4, 3)) == [[0, 1], [2, 3, 4]]
    assert (
        positions_by_group([4, 5], PromptGroups.equal(6, 1)) == [[0], [1]]
        and positions_by_group([], PromptGroups([3])) == []
    )


def test_the_assignment_depends_on_lengths_and_plan_only():
    lengths, minibatches = ragged(3, 24), mb.minibatch_ids(24, 8, 1, 1, 0)
    first = balance_by_flops(lengths, minibatches, 3, HIDDEN)
    torch.manual_seed(5)
    assert torch.equal(first, balance_by_flops(lengths.clone(), minibatches, 3, HIDDEN))
    assert not torch.equal(first, balance_by_flops(lengths.flip(0), minibatches, 3, HIDDEN))
    assert balance_by_flops(torch.zeros(0, dtype=torch.int64), [], 3, HIDDEN).tolist() == []
