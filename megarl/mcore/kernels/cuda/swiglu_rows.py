"""SwiGLU and its gradient, one launch each. It computes in fp32 and rounds once, at the end.

Shapes: n rows, 2F columns of which the first half is the gate, F columns of results.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.mcore.kernels.cuda import operator

TILE = 1024  # columns of a program


@triton.jit
def _halves(x, columns, TILE: tl.constexpr):
    """(gate and linear half in fp32, which columns there are) of a tile of a row."""
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < columns
    place = x + tl.program_id(0).to(tl.int64) * 2 * columns + column
    gate = tl.load(place, mask=is_column, other=0.0).to(tl.float32)
    return gate, tl.load(place + columns, mask=is_column, other=0.0).to(tl.float32), is_column


@triton.jit
def _swiglu(x, out, columns, TILE: tl.constexpr):
    gate, up, is_column = _halves(x, columns, TILE)
    place = out + tl.program_id(0).to(tl.int64) * columns + tl.program_id(1) * TILE + tl.arange(0, TILE)
    tl.store(place, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=is_column)


@triton.jit
def _swiglu_backward(grad, x, grad_x, columns, TILE: tl.constexpr):
    gate, up, is_column = _halves(x, columns, TILE)
    row, column = tl.program_id(0).to(tl.int64) * columns, tl.program_id(1) * TILE + tl.arange(0, TILE)
    grad_out = tl.load(grad + row + column, mask=is_column, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    grad_gate = grad_out * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(grad_x + 2 * row + column, grad_gate.to(grad_x.dtype.element_ty), mask=is_column)
    grad_up = (grad_out * gate * sigmoid).to(grad_x.dtype.element_ty)
    tl.store(grad_x + 2 * row + columns + column, grad_up, mask=is_column)


def _grid(rows: int, columns: int) -> tuple[int, int]:
    return rows, triton.cdiv(columns, TILE)


@operator("swiglu_rows", lambda x: x.new_empty(len(x), x.shape[1] // 2))
def swiglu_rows(x: Tensor) -> Tensor:
    """Contiguous [n, 2F] -> [n, F] = silu(first half) · second half (arXiv 2002.05202 eq. 5)."""
    out = x.new_empty(len(x), x.shape[1] // 2)
    if out.numel():
        _swiglu[_grid(*out.shape)](x, out, out.shape[1], TILE=TILE)
    return out


@operator("swiglu_rows_backward", lambda grad, x: torch.empty_like(x))
def swiglu_rows_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient [n, 2F] of contiguous x, from that of the results [n, F], contiguous, too."""
    grad_x = torch.empty_like(x)
    if grad.numel():
        _swiglu_backward[_grid(*grad.shape)](grad, x, grad_x, grad.shape[1], TILE=TILE)
    return grad_x
