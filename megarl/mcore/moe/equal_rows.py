"""Experts of several ranks in a decode step, in which each of these ranks has equally many rows.

Every rank gathers the rows of all with their gates and experts, computes the (row, expert) pairs of its own experts,
and returns each pair's result to the rank of its row. All sizes are known, so the host waits for nothing, and the step
can be a CUDA graph. A pair is computed and summed as after the exchange by numbers of rows in `moe.layer`.
Messages have room for the case that all pairs are of one rank's experts, which `max_rows` bounds.
Shapes: W ranks of T rows each, of H channels; k of E experts a row.
"""

import itertools
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

# Of the results of all ranks' pairs, of which there are four copies at a time. Up to there their exchange takes less
# time than the waits and launches that it saves, by estimate: at 300 GB/s between the ranks of a node, or 40 GB/s.
MAX_BYTES, MAX_BYTES_BETWEEN_NODES = 64 * 2**20, 8 * 2**20
_ALIGNMENT = 8  # bytes; of the widest numbers in a message


def max_rows(group, topk: int, row_bytes: int) -> int:
    """The largest T: rows of a rank for which the results of all pairs take at most so many bytes."""
    ranks, ranks_of_node = dist.get_process_group_ranks(group), os.environ.get("LOCAL_WORLD_SIZE")
    nodes = {rank // int(ranks_of_node or dist.get_world_size()) for rank in ranks}
    return (MAX_BYTES if len(nodes) == 1 else MAX_BYTES_BETWEEN_NODES) // (len(ranks) * topk * row_bytes)


def exchange_and_compute(
    hidden: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    topk: int,
    group,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Results of the pairs of this rank's rows. Collective over the ranks that share the experts.

    Args:
        hidden: [T, H] rows.
        probs, routing_map: [T, E] gates, and whether each of the k experts was chosen.
        compute: (rows [P, H], gates [P], ends [experts of this rank]) -> [P, H]; the rows of each expert end at `ends`,
            later ones are of no expert here, and what is returned for them is not used.

    Returns:
        (values [W·T·k, H], order [T·k]): where the pairs' results are, by row, those of a row by expert.
    """
    ranks, own_experts = dist.get_world_size(group), routing_map.shape[1] // dist.get_world_size(group)
    experts = torch.nonzero_static(routing_map, size=len(hidden) * topk)[:, 1].view(-1, topk)
    all_hidden, all_gates, all_experts = _gather([hidden, probs.gather(1, experts), experts.int()], group)
    # This rank's experts become the first ones; pairs by expert, those of an expert by rank and row.
    first = dist.get_rank(group) * own_experts
    by_expert, pairs = all_experts.flatten().sub(first).remainder_(ranks * own_experts).sort(stable=True)
    bounds = torch.arange(own_experts, dtype=by_expert.dtype, device=by_expert.device)
    ends = torch.searchsorted(by_expert, bounds, right=True, out_int32=True)
    rows, gates = all_hidden.index_select(0, pairs // topk), all_gates.flatten().index_select(0, pairs)
    computed = compute(rows, gates, ends)
    results = torch.empty_like(computed).index_copy_(0, pairs, computed)
    values = torch.empty_like(results)
    dist.all_to_all_single(values, results, group=group)
    own = torch.arange(experts.numel(), device=experts.device)
    return values, own.add_(experts.flatten() // own_experts, alpha=experts.numel())


def _gather(tensors: list[Tensor], group) -> list[Tensor]:
    """Tensors [T, C] of any types -> [W·T, C] of all ranks, in one message."""
    sent = _message(len(tensors[0]), tensors)
    received = _message(len(tensors[0]) * dist.get_world_size(group), tensors)
    for field, values in zip(_fields(sent, tensors), tensors, strict=True):
        field.copy_(values)
    dist.all_gather_into_tensor(received, sent, group=group)
    return _fields(received, tensors)


def _message(rows: int, like: list[Tensor]) -> Tensor:
    """[rows, bytes] for the columns of some tensors."""
    size = sum(tensor.shape[1] * tensor.itemsize for tensor in like)
    return torch.empty(rows, -(-size // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8, device=like[0].device)


def _fields(message: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Views [rows, C] of a message's columns; wider numbers come first in memory, so that all are aligned."""
    widest_first = sorted(range(len(like)), key=lambda i: -like[i].itemsize)
    ends = list(itertools.accumulate(like[i].shape[1] * like[i].itemsize for i in widest_first))
    columns = {i: message[:, a:b] for i, a, b in zip(widest_first, [0, *ends], ends, strict=False)}
    return [columns[i].view(tensor.dtype) for i, tensor in enumerate(like)]
