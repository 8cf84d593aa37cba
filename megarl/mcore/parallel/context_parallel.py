"""Context parallelism over a packed stream of tokens: which tokens a rank holds, and what moves between the ranks.

The stream of T tokens, all sequences behind each other, is cut into 2·c equal chunks; rank r of c holds chunks r and
2·c − 1 − r, so that each rank has its share of early and of late tokens (2310.05209 has the cut for one sequence).
Chunks may begin and end anywhere in a sequence: sequences of one token need no padding. For attention every rank
gathers keys and values and keeps its own queries (2407.21783, §3.3.2); with grouped queries that is little data.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def chunks_of(rank: int, ranks: int, tokens: int) -> list[tuple[int, int]]:
    """[start, stop) of the chunks of the stream that a rank holds, in stream order; `tokens` divides by 2·ranks."""
    if ranks == 1:
        return [(0, tokens)]
    size = tokens // (2 * ranks)
    return [(i * size, (i + 1) * size) for i in (rank, 2 * ranks - 1 - rank)]


def places_in(chunks: list[tuple[int, int]]) -> np.ndarray:
    """int64 places in the stream of the tokens of chunks."""
    return np.concatenate([np.arange(start, stop) for start, stop in chunks])


def stream_order(ranks: int, tokens: int) -> np.ndarray:
    """[tokens] int64: where the t-th token of the stream stands when the ranks' tokens are gathered in rank order."""
    return np.concatenate([places_in(chunks_of(rank, ranks, tokens)) for rank in range(ranks)]).argsort()


def _all_gather(local: Tensor, group) -> Tensor:
    whole = local.new_empty(dist.get_world_size(group) * local.shape[0], *local.shape[1:])
    dist.all_gather_into_tensor(whole, local.contiguous(), group=group)
    return whole


class _GatherForAttention(torch.autograd.Function):
    """Every rank uses all tokens for its own queries: the gradient of a token is the sum over the ranks."""

    @staticmethod
    def forward(ctx, local: Tensor, order: Tensor, group):
        ctx.save_for_backward(order)
        ctx.group = group
        return _all_gather(local, group)[order]

    @staticmethod
    def backward(ctx, grad: Tensor):
        (order,) = ctx.saved_tensors
        arranged = torch.empty_like(grad)
        arranged[order] = grad
        local = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        dist.reduce_scatter_tensor(local, arranged, group=ctx.group)
        return local, None, None


class _GatherResult(torch.autograd.Function):
    """Every rank goes on with the same computation on all tokens: the gradient of its tokens is its own slice."""

    @staticmethod
    def forward(ctx, local: Tensor, group):
        ctx.group = group
        return _all_gather(local, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


def gather_for_attention(local: Tensor, order: Tensor, group) -> Tensor:
    """Keys or values of this rank's tokens [T/c, …] -> those of the whole stream [T, …], in its order."""
    return _GatherForAttention.apply(local, order, group)


def gather_result(local: Tensor, group) -> Tensor:
    """Results of this rank's tokens [T/n, …] -> of all ranks' tokens [T, …] in rank order, the same on every rank.

    Every rank must compute the same from it: its gradient is not summed over the ranks.
    """
    return _GatherResult.apply(local, group) if dist.get_world_size(group) > 1 else local
