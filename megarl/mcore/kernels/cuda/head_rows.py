"""Sums over a row of logits for its softmax, and the gradient of its scores: one program a row, one pass each.

In single operators they take some twenty passes over fp32 logits. A row's sums run over tiles of fixed size, one after
another, so they do not depend on other rows. Shapes: n rows of V columns, of which the first c are tokens.
"""

import triton
import triton.language as tl
from torch import Tensor

from megarl.mcore.kernels.cuda import operator

TILE, WARPS = 4096, 8  # columns that a program reads at a time
SUMS = 5  # of a row: see `head_sums`


@triton.jit
def scaled(row, start, temperature, count, TILE: tl.constexpr):
    """(scaled logits of a tile of a row, −∞ after the last token; which tokens there are)."""
    column = start + tl.arange(0, TILE)
    is_token = column < count
    return tl.load(row + column, mask=is_token, other=-float("inf")).to(tl.float32) / temperature, is_token


@triton.jit
def _sum_row(
    logits, temperatures, targets, sums, row_stride, temperature, count, sum_stride,
    TILE: tl.constexpr, HAS_TEMPERATURES: tl.constexpr,
):  # fmt: skip
    """Online softmax (1805.02867 §3) with Σ e^s · s and Σ e^2s, s the distance to the largest logit."""
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * row_stride
    if HAS_TEMPERATURES:
        temperature = tl.load(temperatures + number)
    top = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float64)
    weighted, square = total, total
    for start in range(0, count, TILE):
        value, is_token = scaled(row, start, temperature, count, TILE)
        higher = tl.maximum(top, tl.max(value, 0))
        drop = tl.where(top == -float("inf"), 0.0, top - higher).to(tl.float64)
        factor = tl.exp(drop)
        distance = tl.where(is_token, value - higher, 0.0)
        weight = tl.where(is_token, tl.exp(distance), 0.0)
        weighted = factor * (weighted + drop * total) + tl.sum(weight * distance, 0).to(tl.float64)
        total = factor * total + tl.sum(weight, 0).to(tl.float64)
        square = factor * factor * square + tl.sum(weight * weight, 0).to(tl.float64)
        top = higher
    target = tl.load(targets + number)
    is_here = (target >= 0) & (target < count)
    chosen = tl.load(row + target, mask=is_here, other=0.0).to(tl.float32) / temperature
    tl.store(sums + number, top)
    tl.store(sums + sum_stride + number, total.to(tl.float32))
    tl.store(sums + 2 * sum_stride + number, weighted.to(tl.float32))
    tl.store(sums + 3 * sum_stride + number, square.to(tl.float32))
    tl.store(sums + 4 * sum_stride + number, chosen)


@triton.jit
def _grad_row(
    logits, temperatures, targets, statistics, grads, out, row_stride, out_stride, statistic_stride, grad_stride,
    temperature, count, columns, TILE: tl.constexpr, HAS_TEMPERATURES: tl.constexpr,
):  # fmt: skip
    """g_y (1_y − p) − g_H p (log p + H) + 2 g_S p (p − Σπ²), over the temperature."""
    number = tl.program_id(0)
    row, place = logits + number.to(tl.int64) * row_stride, out + number.to(tl.int64) * out_stride
    if HAS_TEMPERATURES:
        temperature = tl.load(temperatures + number)
    statistics, grads = statistics + number, grads + number
    top, total = tl.load(statistics), tl.load(statistics + statistic_stride)
    entropy, square_sum = tl.load(statistics + 2 * statistic_stride), tl.load(statistics + 3 * statistic_stride)
    grad_logprob, grad_entropy = tl.load(grads), tl.load(grads + grad_stride)
    grad_square = tl.load(grads + 2 * grad_stride)
    target, log_total = tl.load(targets + number), tl.log(total)
    for start in range(0, columns, TILE):
        column = start + tl.arange(0, TILE)
        value, is_token = scaled(row, start, temperature, count, TILE)
        distance = tl.where(is_token, value - top, 0.0)
        p = tl.where(is_token, tl.exp(distance) / total, 0.0)
        slope = 2 * grad_square * (p - square_sum) - grad_logprob - grad_entropy * (distance - log_total + entropy)
        grad = (p * slope + tl.where((column == target) & is_token, grad_logprob, 0.0)) / temperature
        tl.store(place + column, grad.to(out.dtype.element_ty), mask=column < columns)


@operator("head_sums", lambda *_: None, mutates=("sums",))
def head_sums(
    sums: Tensor, logits: Tensor, temperatures: Tensor | None, temperature: float, targets: Tensor, count: int
) -> None:
    """Writes [5, n] fp32 of each row of logits over its temperature: the largest, m; Σ e^(x − m); Σ e^(x − m) (x − m);
    Σ e^(2 (x − m)); and that of its target, 0 for one that it does not have.

    Args:
        sums: [5, n], columns next to each other; n columns of those of more rows, for one.
        logits: [n, V], rows contiguous.
        temperatures: [n] fp32, one of each row; None: all have `temperature`.
        targets: [n] int64 columns.
        count: c; later columns are padding. With 0 the first sum is −∞.
    """
    if rows := len(logits):
        options = {"TILE": TILE, "HAS_TEMPERATURES": temperatures is not None, "num_warps": WARPS}
        _sum_row[rows,](
            logits, temperatures, targets, sums, logits.stride(0), temperature, count, sums.stride(0), **options
        )


@operator("head_gradient", lambda *_: None, mutates=("out",))
def head_gradient(
    out: Tensor, logits: Tensor, temperatures: Tensor | None, temperature: float, targets: Tensor, count: int,
    statistics: Tensor, grads: Tensor,
) -> None:  # fmt: skip
    """Writes the gradient of logits to `out` [n, V]; 0 in columns of padding.

    Args:
        logits, temperatures, temperature, targets, count: as of `head_sums`.
        statistics: [4, n] fp32 over the whole vocabulary: largest logit m, Σ e^(x − m), entropy, Σπ²; columns next to
            each other, as those of `grads`.
        grads: [3, n] fp32 of log-prob, entropy and Σπ².
    """
    rows, columns = logits.shape
    if rows:
        _grad_row[rows,](
            logits, temperatures, targets, statistics, grads, out, logits.stride(0), out.stride(0),
            statistics.stride(0), grads.stride(0), temperature, count, columns, TILE=TILE,
            HAS_TEMPERATURES=temperatures is not None, num_warps=WARPS,
        )  # fmt: skip
