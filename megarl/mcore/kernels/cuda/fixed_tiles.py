"""Matrix products whose rows do not depend on how many rows there are: for `--exact-rollout` on CUDA.

A GPU's BLAS chooses tiles, and whether to divide the sum, by the number of rows. In 16 bits this uses Megatron's
batch-invariant Triton kernel, which has one tile size for each type. In fp32 that kernel would round its inputs to
TF32, so scores of routers use a kernel of megarl's. Both sum over the inner size in ascending order of its tiles.
"""

import torch
import triton
import triton.language as tl
from megatron.core.transformer.custom_layers.batch_invariant_kernels import matmul_persistent
from torch import Tensor

from megarl.mcore.kernels.cuda import operator

ROWS, COLUMNS, INNER = 32, 64, 32  # of a tile in fp32


@triton.jit(do_not_specialize=["rows"])
def _product_tile(
    x, weight, bias, out, rows, columns, inner, x_row, weight_row,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One tile of x [rows, inner] · weightᵀ [inner, columns] + bias."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = (row < rows)[:, None], (column < columns)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inner, INNER):
        k = start + tl.arange(0, INNER)
        is_k = (k < inner)[None, :]
        a = tl.load(x + row[:, None].to(tl.int64) * x_row + k[None, :], mask=is_row & is_k, other=0.0)
        b = tl.load(weight + column[:, None].to(tl.int64) * weight_row + k[None, :], mask=is_column & is_k, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0)[None, :]
    place = out + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(place, total, mask=is_row & (column < columns)[None, :])


def _fp32_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    (rows, inner), columns = x.shape, len(weight)
    out = x.new_empty(rows, columns)
    tile = {"ROWS": ROWS, "COLUMNS": COLUMNS, "INNER": INNER, "HAS_BIAS": bias is not None}
    grid = triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS)
    _product_tile[grid](x, weight, bias, out, rows, columns, inner, x.stride(0), weight.stride(0), **tile)
    return out


@operator("fixed_tile_product", lambda x, weight, bias=None: x.new_empty(len(x), len(weight)))
def fixed_tile_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[T, K] and weight [N, K] -> [T, N] = x · weightᵀ + bias [N], all of one type: fp32, fp16 or bf16."""
    if not len(x):
        return x.new_empty(0, len(weight))
    return _fp32_product(x, weight, bias) if x.dtype is torch.float32 else matmul_persistent(x, weight.t(), bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[…, K] and weight [N, K] -> […, N]. Not differentiable; `kernels.linear.linear` is."""
    return fixed_tile_product(x.flatten(0, -2), weight, bias).unflatten(0, x.shape[:-1])
