"""The sum of hidden states and a layer's output, and the RMSNorm of that sum: one launch, and one for the gradients.

The sum rounds as PyTorch's, of which the norm reads the rounded values. The norm computes in fp32 and rounds once
(1910.07467 eq. 4). A row is in one tile of a size that follows from its length, so its bits do not depend on the other
rows. Weights' gradients are sums over all rows, in an order that their number decides: programs of their own add up
some columns each, so that nothing is added by atomics and one launch does both.
Shapes: n rows, H columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.mcore.kernels.cuda import operator

MAX_COLUMNS = 16384  # of a row: what one program holds
ROW_TILE, COLUMN_TILE = 64, 32  # of a program of weights' gradients
WARPS = 8


@triton.jit
def _sum_norm_row(x, added, weight, total, out, scales, columns, epsilon, TILE: tl.constexpr):
    number, column = tl.program_id(0), tl.arange(0, TILE)
    is_column, place = column < columns, number.to(tl.int64) * columns + column
    first = tl.load(x + place, mask=is_column, other=0.0).to(tl.float32)
    rounded = (first + tl.load(added + place, mask=is_column, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + place, rounded, mask=is_column)
    value = rounded.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, 0) / columns + epsilon)
    gain = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + place, (value * scale * gain).to(out.dtype.element_ty), mask=is_column)
    tl.store(scales + number, scale)


@triton.jit
def _weight_columns(
    tile, grad, total, scales, grad_weight, rows, columns, ROW_TILE: tl.constexpr, COLUMN_TILE: tl.constexpr
):
    """Adds some columns of the weight's gradient to what is there."""
    column = tile * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    is_column, sums = column < columns, tl.zeros([ROW_TILE, COLUMN_TILE], tl.float32)
    for start in range(0, rows, ROW_TILE):
        row = start + tl.arange(0, ROW_TILE)
        is_there = (row < rows)[:, None] & is_column[None, :]
        place = row[:, None].to(tl.int64) * columns + column[None, :]
        normed = tl.load(total + place, mask=is_there, other=0.0).to(tl.float32)
        normed *= tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        sums += normed * tl.load(grad + place, mask=is_there, other=0.0).to(tl.float32)
    before = tl.load(grad_weight + column, mask=is_column, other=0.0)
    tl.store(grad_weight + column, before + tl.sum(sums, 0), mask=is_column)


@triton.jit
def _grad_row(row, grad_total, grad, total, weight, scales, grad_x, columns, TILE: tl.constexpr):
    column = tl.arange(0, TILE)
    is_column, place = column < columns, row.to(tl.int64) * columns + column
    scale = tl.load(scales + row)
    normed = tl.load(total + place, mask=is_column, other=0.0).to(tl.float32) * scale
    scaled = tl.load(grad + place, mask=is_column, other=0.0).to(tl.float32)
    scaled *= tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    own = scale * (scaled - normed * (tl.sum(scaled * normed, 0) / columns))
    kind = grad_x.dtype.element_ty
    others = tl.load(grad_total + place, mask=is_column, other=0.0).to(tl.float32)
    tl.store(grad_x + place, (own.to(kind).to(tl.float32) + others).to(kind), mask=is_column)


@triton.jit
def _sum_norm_gradients(
    grad_total, grad, total, weight, scales, grad_x, grad_weight, rows, columns, tiles,
    TILE: tl.constexpr, ROW_TILE: tl.constexpr, COLUMN_TILE: tl.constexpr,
):  # fmt: skip
    """The first `tiles` programs: columns of the weight's gradient; others: a row each."""
    number = tl.program_id(0)
    if number < tiles:
        _weight_columns(number, grad, total, scales, grad_weight, rows, columns, ROW_TILE, COLUMN_TILE)
    else:
        _grad_row(number - tiles, grad_total, grad, total, weight, scales, grad_x, columns, TILE)


def _empty_sums(x, *_):
    return [torch.empty_like(x), torch.empty_like(x), x.new_empty(x[..., :1].shape, dtype=torch.float32)]


def _tiles(columns: int) -> dict:
    return {"TILE": triton.next_power_of_2(columns), "num_warps": WARPS}


@operator("sum_norm", _empty_sums)
def sum_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> list[Tensor]:
    """x + added, its norm, both [..., H], and the reciprocal root mean squares […, 1] fp32.

    Args:
        x, added: [..., H], contiguous, of one type.
        weight: [H], H at most `MAX_COLUMNS`.
    """
    total, out, scales = _empty_sums(x)
    if scales.numel():
        columns = x.shape[-1]
        _sum_norm_row[scales.numel(),](x, added, weight, total, out, scales, columns, eps, **_tiles(columns))
    return [total, out, scales]


@operator("sum_norm_backward", lambda *_: None, mutates=("grad_x", "grad_weight"))
def sum_norm_backward(
    grad_x: Tensor, grad_weight: Tensor, grad_total: Tensor, grad: Tensor, total: Tensor, weight: Tensor, scales: Tensor
) -> None:
    """Writes the gradient of both summands to `grad_x` […, H], and adds the weight's to `grad_weight` [H] fp32.

    Args:
        grad_total, grad: gradients of the sum and of its norm, contiguous as `grad_x`.
        total, weight, scales: as of `sum_norm`.
    """
    rows, columns = scales.numel(), total.shape[-1]
    if rows:
        tiles = triton.cdiv(columns, COLUMN_TILE)
        _sum_norm_gradients[tiles + rows,](
            grad_total, grad, total, weight, scales, grad_x, grad_weight, rows, columns, tiles,
            ROW_TILE=ROW_TILE, COLUMN_TILE=COLUMN_TILE, **_tiles(columns),
        )  # fmt: skip
