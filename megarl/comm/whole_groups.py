"""Whole groups: all responses to one prompt meet on one replica of a role that compares them.

The responses reach the role as they do otherwise, by the exchange of the step's batch, and what it computes goes back
by the same way: only the assignment differs.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from megarl.comm.load_balance import assign_by_cost
from megarl.comm.microbatches import sequence_flops
from megarl.groups import PromptGroups


def with_whole_groups(
    dp_assignment: Tensor, lengths: Tensor, groups: PromptGroups, replicas: int, hidden: int
) -> Tensor:
    """An assignment in which no group is on two replicas.

    It is `dp_assignment` if that has none, so that roles on the same ranks go on to share their batch. Otherwise groups
    are assigned by their FLOPs, the most expensive first. It depends only on the arguments, the same on every rank.

    Args:
        dp_assignment: [N] int64, the dp rank of each sequence of the step.
        lengths: [N] tokens in each sequence.
        replicas: of the role.
        hidden: hidden size, by which the work is estimated.
    """
    if torch.equal(groups.expand(dp_assignment[groups.starts]), dp_assignment):
        return dp_assignment
    flops = groups.reduce(sequence_flops(lengths, hidden), "sum")
    return groups.expand(assign_by_cost(flops, [torch.arange(len(flops))], replicas))


def positions_by_group(sequence_ids: Sequence[int], groups: PromptGroups) -> list[list[int]]:
    """Positions of the sequences of each group, given the ascending ids of what a replica holds.

    Some of a group may be missing: an episode whose environment failed has nothing to compare.
    """
    numbers = groups.of(torch.tensor(sequence_ids, dtype=torch.int64)).tolist()
    return [list(members) for _, members in groupby(range(len(numbers)), key=numbers.__getitem__)]
