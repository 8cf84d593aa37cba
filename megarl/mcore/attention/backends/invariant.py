"""`--attention-backend invariant`: a query has the same bits in rollout and in training. For `--exact-rollout` on CUDA.

Decode steps, prefills and training's forward run one kernel (`kernels.cuda.segment_attention`) with the same tiles and
the same order of keys. Backward is flash attention's of PyTorch, from the outputs and log-sums of that forward.
Shapes: as in `sdpa`.
"""

import functools

import torch
from torch import Tensor

from megarl.mcore.attention.backends import varlen
from megarl.mcore.attention.backends.varlen import CumulativePlan
from megarl.mcore.attention.cache_attention import softmax_scale
from megarl.mcore.attention.segments import HostPlan, Segments
from megarl.mcore.kernels import with_gradient

plan_cache_reads, reads_of_table = varlen.plan_cache_reads, varlen.reads_of_table


def plan_attention(segments: Segments, is_whole: bool, window: int | None) -> HostPlan:
    """Plans a `CumulativePlan` with rows; arguments as of `varlen.plan_attention`."""
    return varlen.plan_attention(segments, False, window)


def _attention_gradient(ctx, grad):
    query, key, value, out, log_sums, cu_queries, cu_keys = ctx.saved_tensors
    plan, (left, right) = ctx.plan, ctx.plan.window_size
    random = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which there is none of
    grads = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), query, key, value, out, log_sums, cu_queries, cu_keys, plan.max_queries, plan.max_keys,
        0.0, True, random, query.new_empty(0), scale=ctx.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return *grads, None, None


@with_gradient(_attention_gradient)
def _attention(ctx, query, key, value, plan: CumulativePlan, scale: float):
    """query [T, H, D], key and value [keys, G, D] of the plan's rows -> [T, H, D]."""
    rows = torch.arange(len(key), dtype=torch.int32, device=key.device)
    out, log_sums = _attend(query, key, value, rows, plan, scale)
    ctx.save_for_backward(query, key, value, out, log_sums, plan.cu_queries, plan.cu_keys)
    ctx.plan, ctx.scale = plan, scale
    return out


def _attend(query, key, value, rows: Tensor, plan: CumulativePlan, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs [T, H, D] and log-sums [H, T]; `rows` [Σ k] int32: of key and value, by segment."""
    from megarl.mcore.kernels.cuda.segment_attention import packed_attention  # needs Triton

    return packed_attention(query, key, value, rows, plan.segments, plan.max_queries, scale, window=plan.window)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, plan: CumulativePlan, scale: float | None) -> Tensor:
    """As that of `sdpa`. Gradients of keys that several segments read are added in a fixed order."""
    return _attention(query, key[plan.rows], value[plan.rows], plan, softmax_scale(query.shape[-1], scale))


def _attend_cache(query: Tensor, cache: Tensor, plan: CumulativePlan, scale: float) -> Tensor:
    key, value = cache.flatten(0, 1).unbind(2)
    return _attend(query, key, value, plan.rows.int(), plan, scale)[0]


# By the kernel of training, which adds up the keys of a query in one part.
PagedAttention = functools.partial(varlen.PagedAttention, _attend_cache, in_parts=False)
