"""`--attention-backend eager`: attention written out, for scores that fused kernels do not compute.

Softcap (Gemma 2, 2408.00118 §2): scores become c · tanh(scores/c). Sinks (GPT-OSS, 2309.17453): each head has one more
key whose score is a weight and whose value is 0. A segment's scores exist in memory; backward computes them again.
Sums over keys run as matrix products and softmax rows of whole vectors, so a token has the same bits in every batch.
Shapes: n segments of Q queries and K keys, H query heads, G key/value groups of R heads each, D channels per head.
"""

import functools
import math

import torch
from torch import Tensor

from megarl.mcore.attention.backends import sdpa
from megarl.mcore.attention.segments import SegmentBatch, SegmentPlan
from megarl.mcore.kernels import with_gradient
from megarl.mcore.kernels.batch_invariance import MIN_ROWS, by_whole_rows
from megarl.mcore.kernels.linear import HALF

plan_attention, plan_cache_reads = sdpa.plan_attention, sdpa.plan_cache_reads
MAX_SCORES = 2**24  # scores [n, H, Q, K] that exist at a time, if n > 1


def _wide(x: Tensor) -> Tensor:
    """On a CPU 16 bits as fp32: see `linear.SMALL_PRODUCT`."""
    return x.float() if x.dtype in HALF and x.device.type == "cpu" else x


def _in_vectors(function, column: Tensor) -> Tensor:
    """Applies an element-wise function to [..., 1]; each element has vectors of its own, so its place has no effect."""
    return by_whole_rows(function, column.reshape(-1, 1)).view(column.shape)


def _weights(query: Tensor, key: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None):
    """Returns softmax weights [n, G, R, Q, K] in at least fp32, what the softcap's tangent leaves of a score's gradient
    (None: all), and the sink's share [n, G, R, Q, 1] (None: no sinks).

    query [n, G, R, Q, D], key [n, G, K, D], mask [n or 1, 1, Q or 1, K], sinks [G, R].
    """
    raw = torch.matmul(_wide(query).flatten(2, 3), _wide(key).transpose(2, 3)).view(*query.shape[:-1], -1)
    scores, slope = raw.to(torch.promote_types(raw.dtype, torch.float32)) * scale, None
    if softcap is not None:
        tanh = by_whole_rows(torch.tanh, (scores / softcap).flatten(0, -2)).view(scores.shape)
        scores, slope = tanh * softcap, 1 - tanh.square()
    scores = scores.masked_fill(~mask.unsqueeze(1), -math.inf)
    weights = scores.softmax(-1)
    if sinks is None:
        return weights, slope, None
    # The largest weight is e^0 over the sum of all: log Σ e^score needs no sum in another order.
    log_sum = scores.amax(-1, keepdim=True) - _in_vectors(torch.log, weights.amax(-1, keepdim=True))
    share = _in_vectors(torch.sigmoid, sinks.to(scores.dtype)[:, :, None, None] - log_sum)
    return weights * (1 - share), slope, share


def _chunks(query: Tensor, key: Tensor) -> list[slice]:
    each = query.shape[1] * query.shape[2] * key.shape[2]
    step = max(1, MAX_SCORES // each)
    return [slice(i, i + step) for i in range(0, len(query), step)]


def _attention_gradient(ctx, grad):
    """With weights p and output y: ∂v = pᵀ∂y, ∂score = p · (∂y·v − ∂y·y), ∂sink = −share · ∂y·y."""
    query, key, value, sinks, mask = ctx.saved_tensors
    grads = [torch.empty_like(x) for x in (query, key, value)]
    wide = torch.promote_types(query.dtype, torch.float32)
    grad_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=wide)
    for rows in _chunks(query, key):
        q, sink = _grouped(query[rows], key, sinks)
        weights, slope, share = _weights(q, key[rows], _of_rows(mask, rows), *ctx.options, sink)
        flat = grad[rows].reshape(*q.shape).to(weights.dtype)
        of_weights = torch.matmul(flat.flatten(2, 3), value[rows].to(weights.dtype).transpose(2, 3))
        of_weights = of_weights.view(weights.shape)
        mean = (weights * of_weights).sum(-1, keepdim=True)  # ∂y·y
        of_scores = weights * (of_weights - mean)
        if slope is not None:
            of_scores *= slope
        of_scores = (of_scores * ctx.options[0]).flatten(2, 3)
        grads[0][rows] = torch.matmul(of_scores, key[rows].to(of_scores.dtype)).view(grads[0][rows].shape)
        grads[1][rows] = torch.matmul(of_scores.transpose(2, 3), q.flatten(2, 3).to(of_scores.dtype))
        grads[2][rows] = torch.matmul(weights.flatten(2, 3).transpose(2, 3), flat.flatten(2, 3))
        if share is not None:
            grad_sinks -= (share * mean).sum((0, 3, 4)).flatten()
    return *grads, None if sinks is None else grad_sinks.to(sinks.dtype), None, None, None


@with_gradient(_attention_gradient)
def _attention(ctx, query, key, value, sinks, mask, scale, softcap):
    """query [n, H, Q, D], key, value [n, G, K, D], sinks [H] or None, mask [n or 1, 1, Q or 1, K] -> [n, H, Q, D]."""
    ctx.save_for_backward(query, key, value, sinks, mask)
    ctx.options = scale, softcap
    out = query.new_empty(query.shape)  # the query of a decode is an expanded view
    for rows in _chunks(query, key):
        q, sink = _grouped(query[rows], key, sinks)
        weights, *_ = _weights(q, key[rows], _of_rows(mask, rows), scale, softcap, sink)
        values = _wide(value[rows])
        attended = torch.matmul(weights.to(values.dtype).flatten(2, 3), values)
        out[rows] = attended.view(out[rows].shape)
    return out


def _grouped(query: Tensor, key: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    groups = key.shape[1]
    return query.unflatten(1, (groups, -1)), None if sinks is None else sinks.view(groups, -1)


def _of_rows(mask: Tensor, rows: slice) -> Tensor:
    return mask if len(mask) == 1 else mask[rows]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, softcap, sinks) -> Tensor:
    """Returns [n, H, Q, D]; mask [n or 1, 1, Q or 1, K] bool, True where attended; sinks [H] or None."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _attention(query, key, value, sinks, mask, scale, softcap)


def attend_segments(
    query: Tensor, key: Tensor, value: Tensor, segments: SegmentBatch, scale, softcap=None, sinks=None
) -> Tensor:
    query, mask = sdpa.gather_rows(query, segments.queries), segments.mask
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()[None, None]
    out = attend(query, key, value, mask, scale, softcap, sinks)
    return out.transpose(1, 2).flatten(0, 1)[segments.real_queries]


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, segments: SegmentPlan, scale: float | None, softcap=None, sinks=None
) -> Tensor:
    """As that of `sdpa`, with `softcap` and the `sinks` [H] of this rank's heads."""
    attend = functools.partial(attend_segments, softcap=softcap, sinks=sinks)
    return sdpa.packed_attention(query, key, value, segments, scale, attend)


class EagerPagedAttention(sdpa.PagedAttention):
    """As that of `sdpa`, with softcap and sinks."""

    _attend = staticmethod(attend_segments)

    def _decode(self, query: Tensor, cache: Tensor, reads: sdpa.DecodeReads, scale, softcap=None, sinks=None) -> Tensor:
        """[n, G, R, D] -> [n, G, R, D]. Each head's row is repeated: a product of fewer rows uses another kernel."""
        copies = MIN_ROWS // math.gcd(query.shape[2], MIN_ROWS)
        key, value = self._gather_pages(cache, reads.pages, reads.mask.shape[-1], len(query))
        rows = query.flatten(1, 2).unsqueeze(2).expand(-1, -1, copies, -1)
        return attend(rows, key, value, reads.mask == 0, scale, softcap, sinks)[:, :, 0].view(query.shape)


PagedAttention = EagerPagedAttention  # the name of a backend's
