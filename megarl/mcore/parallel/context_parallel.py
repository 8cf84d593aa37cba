"""Context parallelism over a packed token stream: which tokens each rank holds, and the collectives between ranks.

The stream of T tokens, all sequences one after another, is split into 2·c equal chunks. Rank r of c holds chunks r and
2·c − 1 − r, so that each rank has early and late tokens (2310.05209 does this for one sequence). Chunk boundaries
ignore sequence boundaries, so that no sequence needs padding. For attention every rank all-gathers keys and values and
keeps its own queries (2407.21783, §3.3.2); with grouped queries that is little data. A recurrent state needs all tokens
before a token: for it each rank gets all tokens of a share of the heads (2309.14509 does this for attention).
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor


def chunks_of(rank: int, ranks: int, tokens: int) -> list[tuple[int, int]]:
    """Returns [start, stop) of the stream chunks of a rank, in stream order; 2·ranks must divide `tokens`."""
    if ranks == 1:
        return [(0, tokens)]
    size = tokens // (2 * ranks)
    return [(i * size, (i + 1) * size) for i in (rank, 2 * ranks - 1 - rank)]


def chunk_indices(chunks: list[tuple[int, int]]) -> np.ndarray:
    """Returns int64 stream indices of the chunks' tokens."""
    return np.concatenate([np.arange(start, stop) for start, stop in chunks])


def stream_order(ranks: int, tokens: int) -> np.ndarray:
    """Returns [tokens] int64: index of the t-th stream token among all ranks' tokens gathered in rank order."""
    return np.concatenate([chunk_indices(chunks_of(rank, ranks, tokens)) for rank in range(ranks)]).argsort()


class _GatherForAttention(torch.autograd.Function):
    """All-gather whose backward is a reduce-scatter: each rank uses all tokens for its own queries."""

    @staticmethod
    def forward(ctx, local: Tensor, order: Tensor, group):
        ctx.save_for_backward(order)
        ctx.group = group
        return gather_from_sequence_parallel_region(local, group=group)[order]

    @staticmethod
    def backward(ctx, grad: Tensor):
        (order,) = ctx.saved_tensors
        by_rank = torch.empty_like(grad)
        by_rank[order] = grad
        local = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.reduce_scatter_tensor(local, by_rank, group=ctx.group)
        return local, None, None


def gather_for_attention(local: Tensor, order: Tensor, group) -> Tensor:
    """Gathers keys or values of this rank's tokens [T/c, …] to those of the whole stream [T, …], in stream order."""
    return _GatherForAttention.apply(local, order, group)


def gather_result(local: Tensor, group) -> Tensor:
    """Gathers results of this rank's tokens [T/n, …] to all ranks' tokens [T, …], in rank order. Every rank must
    compute the same from the result: gradients are not summed over the ranks."""
    return gather_from_sequence_parallel_region(local, tensor_parallel_output_grad=False, group=group)


def to_heads(local: Tensor, sections: Sequence[int], order: Tensor, group) -> Tensor:
    """Gives each of c ranks all tokens of a share of the heads: [T/c, W] -> [T, W/c] in stream order. `sections`:
    columns of each kind of channels, heads one after another; a rank gets the same share of each."""
    ranks = dist.get_world_size(group)
    parts = torch.cat([part.unflatten(1, (ranks, -1)) for part in local.split(list(sections), 1)], 2)
    return all_to_all(group, parts.transpose(0, 1)).flatten(0, 1)[order]


def to_tokens(of_heads: Tensor, order: Tensor, group) -> Tensor:
    """The reverse of `to_heads` for one kind of channels: [T, W/c] -> [T/c, W]."""
    by_rank = torch.empty_like(order)
    by_rank[order] = torch.arange(len(order), device=order.device)
    parts = of_heads[by_rank].unflatten(0, (dist.get_world_size(group), -1))
    return all_to_all(group, parts).transpose(0, 1).flatten(1)
