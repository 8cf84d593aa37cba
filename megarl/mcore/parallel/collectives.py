"""Collectives that cost nothing where a group has one rank."""

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore import device


def all_reduce(values: Tensor, group, op=dist.ReduceOp.SUM) -> Tensor:
    """Reduces a tensor over the ranks of a group, in place, and returns it.

    A rank alone calls nothing: gloo would hand the tensor to a thread and wait for it, which takes as long as several
    small operators.
    """
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, op=op, group=group)
    return values


def all_reduce_max(values: Tensor, group) -> Tensor:
    """The largest of each number over the ranks of a group, in place; NaN if a rank has NaN.

    gloo keeps a NaN of the first rank alone: of the others a comparison, which is false, takes the other number.
    """
    if dist.get_world_size(group) == 1 or not values.is_floating_point():
        return all_reduce(values, group, dist.ReduceOp.MAX)
    is_nan = values.isnan()
    both = torch.stack([values.masked_fill(is_nan, -torch.inf), is_nan.to(values.dtype)])
    largest, has_nan = all_reduce(both, group, dist.ReduceOp.MAX)
    return values.copy_(largest.masked_fill(has_nan > 0, torch.nan))


def all_reduce_number(value: int, group, op=dist.ReduceOp.SUM) -> int:
    """Reduces a number over the ranks of a group, and waits for the result."""
    if dist.get_world_size(group) == 1:
        return value
    return int(all_reduce(torch.tensor([value], dtype=torch.int64, device=device.device()), group, op))
