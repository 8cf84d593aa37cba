"""RMSNorm and LayerNorm with one program per row: for `--exact-rollout` on CUDA.

A row is summed in tiles of a size that follows from its length alone, so its bits do not depend on other rows.
PyTorch's kernels choose theirs by alignment, too. It computes in fp32 and rounds once, at the end.
Shapes: n rows, H columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.mcore.kernels import with_gradient
from megarl.mcore.kernels.cuda import operator

MAX_TILE = 2048  # columns that a program reads at a time


@triton.jit
def _values(row, start, columns, TILE: tl.constexpr):
    """(values in fp32, 0 after the last column, and which columns there are) of a tile of a row."""
    column = start + tl.arange(0, TILE)
    return tl.load(row + column, mask=column < columns, other=0.0).to(tl.float32), column < columns


@triton.jit
def _norm_row(
    x, weight, bias, out, means, scales, columns, epsilon,
    TILE: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    row, place = x + number.to(tl.int64) * columns, out + number.to(tl.int64) * columns
    mean = tl.full([], 0.0, tl.float32)
    if HAS_MEAN:
        sums = tl.zeros([TILE], tl.float32)
        for start in range(0, columns, TILE):
            sums += _values(row, start, columns, TILE)[0]
        mean = tl.sum(sums, 0) / columns
    squares = tl.zeros([TILE], tl.float32)
    for start in range(0, columns, TILE):
        value, is_column = _values(row, start, columns, TILE)
        centred = tl.where(is_column, value - mean, 0.0)
        squares += centred * centred
    scale = 1 / tl.sqrt(tl.sum(squares, 0) / columns + epsilon)
    for start in range(0, columns, TILE):
        value, is_column = _values(row, start, columns, TILE)
        result = (value - mean) * scale * _values(weight, start, columns, TILE)[0]
        if HAS_BIAS:
            result += _values(bias, start, columns, TILE)[0]
        tl.store(place + start + tl.arange(0, TILE), result.to(out.dtype.element_ty), mask=is_column)
    tl.store(means + number, mean)
    tl.store(scales + number, scale)


def _empty_norms(x, *_):
    return [torch.empty_like(x), *(x.new_empty(len(x), 1, dtype=torch.float32) for _ in range(2))]


@operator("norm_rows", _empty_norms)
def norm_rows(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, has_mean: bool) -> list[Tensor]:
    """Contiguous x [n, H], weight [H] and bias [H] in fp32 -> normed [n, H], and means and reciprocal root mean squares
    [n, 1] in fp32; `has_mean`: the mean is subtracted, as LayerNorm does."""
    if x.data_ptr() % 16:  # the order of a row's sum follows from how wide the loads are
        x = x.clone()
    out, mean, scale = _empty_norms(x)
    tile = min(triton.next_power_of_2(x.shape[1]), MAX_TILE)
    if len(x):
        _norm_row[len(x),](
            x, weight, bias, out, mean, scale, x.shape[1], eps, TILE=tile, HAS_MEAN=has_mean, HAS_BIAS=bias is not None
        )
    return [out, mean, scale]


def _row_norm_gradient(ctx, grad):
    """With n = (x − mean) · r and g = grad · weight: ∂x = r · (g − n · mean(g · n) [− mean(g)])."""
    x, weight, mean, scale = ctx.saved_tensors
    grad, normed = grad.float(), (x - mean) * scale
    scaled = grad * weight
    grad_x = scaled - normed * (scaled * normed).mean(-1, keepdim=True)
    if ctx.has_mean:
        grad_x -= scaled.mean(-1, keepdim=True)
    grad_bias = grad.sum(0) if ctx.has_bias else None
    return grad_x.mul_(scale).to(x.dtype), (grad * normed).sum(0), grad_bias, None, None


@with_gradient(_row_norm_gradient)
def _row_norm(ctx, x, weight, bias, eps, has_mean):
    """x [n, H] -> (x − mean) · r · weight + bias with r = (mean of squares + ε)^−½ (1910.07467 eq. 4, 1607.06450)."""
    out, mean, scale = norm_rows(x, weight, bias, eps, has_mean)
    ctx.save_for_backward(x, weight, mean, scale)
    ctx.has_mean, ctx.has_bias = has_mean, bias is not None
    return out


def row_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of […, H] with a bias, RMSNorm without one; weight and bias [H] in fp32. Differentiable once."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _row_norm(rows, weight, bias, eps, bias is not None).view(x.shape)
