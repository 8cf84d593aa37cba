"""Matrix products and norms whose rows do not depend on how many rows there are: for `--exact-rollout` on CUDA.

Products: a GPU's BLAS chooses tiles, and whether to divide the sum, by the number of rows. In 16 bits this uses
Megatron's batch-invariant Triton kernel, which has one tile size for each type. In fp32 that kernel would round its
inputs to TF32, so scores of routers use a kernel of megarl's, and so do products of each head with a weight of its own.
Both sum over the inner size in ascending order of its tiles.

RMSNorm and LayerNorm have one program per row. A row is summed in tiles of a size that follows from its length alone.
PyTorch's kernels choose theirs by alignment, too. They compute in fp32 and round once, at the end.
Shapes of norms: n rows, H columns.

Beside them what any run in 16 bits uses: the sum of hidden states and a layer's output together with the RMSNorm of
that sum, one launch, and one for the gradients. The sum rounds as PyTorch's, and the norm reads the rounded values.
Weights' gradients are sums over all rows, in an order that their number decides: programs of their own add up some
columns each, so that nothing is added by atomics and one launch does both.
"""

import torch
import triton
import triton.language as tl
from megatron.core.transformer.custom_layers.batch_invariant_kernels import matmul_persistent
from torch import Tensor

from megarl.mcore.kernels import with_gradient
from megarl.mcore.kernels.cuda import operator

ROWS, COLUMNS, INNER = 32, 64, 32  # of a tile in fp32


@triton.jit(do_not_specialize=["rows"])
def _product_tile(
    x, weight, bias, out, rows, columns, inner, x_row, x_head, weight_row, weight_head, weight_inner, out_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One tile of x [rows, inner] · weightᵀ [inner, columns] + bias, of a head whose results follow those before."""
    head = tl.program_id(2).to(tl.int64)
    x, weight, out = x + head * x_head, weight + head * weight_head, out + head * columns
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = (row < rows)[:, None], (column < columns)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inner, INNER):
        k = start + tl.arange(0, INNER)
        is_k = (k < inner)[None, :]
        a = tl.load(x + row[:, None].to(tl.int64) * x_row + k[None, :], mask=is_row & is_k, other=0.0)
        own = weight + column[:, None].to(tl.int64) * weight_row + k[None, :] * weight_inner
        b = tl.load(own, mask=is_column & is_k, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0)[None, :]
    place = out + row[:, None].to(tl.int64) * out_row + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row & (column < columns)[None, :])


def _tiles_by_head(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    (rows, heads, inner), columns = x.shape, weight.shape[1]
    x = x if x.stride(2) == 1 else x.contiguous()
    out = x.new_empty(rows, heads, columns)
    tile = {"ROWS": ROWS, "COLUMNS": COLUMNS, "INNER": INNER, "HAS_BIAS": bias is not None}
    head, row, one = weight.stride()
    if rows:
        _product_tile[triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS), heads](
            x, weight, bias, out, rows, columns, inner, *x.stride()[:2], row, head, one, heads * columns, **tile
        )
    return out


@operator("product_by_head", lambda x, weight: x.new_empty(*x.shape[:2], weight.shape[1]))
def product_by_head(x: Tensor, weight: Tensor) -> Tensor:
    """[n, A, K] and weight [A, N, K] -> [n, A, N] = x · weightᵀ of each head, all of one type."""
    return _tiles_by_head(x, weight)


@operator("fixed_tile_product", lambda x, weight, bias=None: x.new_empty(len(x), len(weight)))
def fixed_tile_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[T, K] and weight [N, K] -> [T, N] = x · weightᵀ + bias [N], all of one type: fp32, fp16 or bf16."""
    if not len(x):
        return x.new_empty(0, len(weight))
    if x.dtype is torch.float32:
        return _tiles_by_head(x.unsqueeze(1), weight.unsqueeze(0), bias).squeeze(1)
    return matmul_persistent(x, weight.t(), bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[…, K] and weight [N, K] -> […, N]. Not differentiable; `kernels.linear.linear` is."""
    return fixed_tile_product(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])


# -- norms -----------------------------------------------------------------------------------------------------------


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


# -- sums with their norms ---------------------------------------------------------------------------------------------


MAX_COLUMNS, WARPS = 16384, 8  # of a row: what one program holds
ROW_TILE, COLUMN_TILE = 64, 32  # of a program of weights' gradients


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
    grad_total,
    grad,
    total,
    weight,
    scales,
    grad_x,
    grad_weight,
    rows,
    columns,
    tiles,
    TILE: tl.constexpr,
    ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
):
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
            grad_total,
            grad,
            total,
            weight,
            scales,
            grad_x,
            grad_weight,
            rows,
            columns,
            tiles,
            ROW_TILE=ROW_TILE,
            COLUMN_TILE=COLUMN_TILE,
            **_tiles(columns),
        )
