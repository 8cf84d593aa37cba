"""Whole groups: all responses to one prompt meet on one replica of a role that compares them.

A group is `samples` sequences with adjacent ids. The responses reach the role as they do otherwise, by the exchange of
the step's batch, and what it computes goes back by the same way: only the assignment differs.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from megarl.comm.load_balance import assign_by_cost
from megarl.comm.microbatches import sequence_flops


def with_whole_groups(dp_assignment: Tensor, lengths: Tensor, samples: int, replicas: int, hidden: int) -> Tensor:
    """An assignment in which no group is on two replicas.

    It is `dp_assignment` if that has none, so that roles on the same ranks go on to share their batch. Otherwise groups
    are assigned by their FLOPs, the most expensive first. It depends only on the arguments, the same on every rank.

    Args:
        dp_assignment: [N] int64, the dp rank of each sequence of the step.
        lengths: [N] tokens in each sequence.
        samples: sequences in a group; divides N.
        replicas: of the role.
        hidden: hidden size, by which the work is estimated.
    """
    by_group = dp_assignment.view(-1, samples)
    if torch.equal(by_group, by_group[:, :1].expand_as(by_group)):
        return dp_assignment
    flops = sequence_flops(lengths, hidden).view(-1, samples).sum(1)
    return assign_by_cost(flops, [torch.arange(len(flops))], replicas).repeat_interleave(samples)


def positions_by_group(sequence_ids: Sequence[int], samples: int) -> list[list[int]]:
    """Positions of the sequences of each group, given the ascending ids of what a replica holds.

    A group may have fewer than `samples`: an episode whose environment failed has nothing to compare.
    """
    positions = range(len(sequence_ids))
    return [list(members) for _, members in groupby(positions, key=lambda i: sequence_ids[i] // samples)]
