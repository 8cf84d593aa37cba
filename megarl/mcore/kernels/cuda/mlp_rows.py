"""Kernels of MLPs and experts: SwiGLU and its gradient, one launch each; pairs of tokens and their experts, where each
lies in the order of the experts, and sums of a token's results.

SwiGLU computes in fp32 and rounds once, at the end. Small operators and sorts found the pairs in about 30 launches a
layer, more time in a decode step than the experts' products. Nothing is added by atomics, so that all results have the
same bits in each run.
Shapes: n rows, 2F columns of which the first half is the gate, F columns of results; T tokens with k of E experts each,
P = T·k pairs, H channels.
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


# -- pairs -----------------------------------------------------------------------------------------------------------


TOKEN_TILE, CHANNEL_TILE = 1024, 1024


@triton.jit
def _pairs_of_expert(
    routing_map, counts, gates, tokens, places, count, experts, EXPERT_TILE: tl.constexpr, TOKEN_TILE: tl.constexpr
):
    expert, others = tl.program_id(0), tl.arange(0, EXPERT_TILE)
    place = tl.sum(tl.load(counts + others, mask=others < expert, other=0), 0)  # of its next pair
    for start in range(0, count, TOKEN_TILE):
        token = start + tl.arange(0, TOKEN_TILE).to(tl.int64)
        is_routed = tl.load(routing_map + token * experts + expert, mask=token < count, other=0).to(tl.int64)
        own = place + tl.cumsum(is_routed, 0) - 1
        tl.store(gates + own, token * experts + expert, mask=is_routed > 0)
        tl.store(tokens + own, token, mask=is_routed > 0)
        tl.store(places + token * experts + expert, own, mask=is_routed > 0)
        place += tl.sum(is_routed, 0)


@triton.jit
def _pairs_of_token(routing_map, places, order, each, experts, EXPERT_TILE: tl.constexpr):
    token, expert = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERT_TILE)
    row = token * experts + expert
    is_routed = tl.load(routing_map + row, mask=expert < experts, other=0).to(tl.int64)
    number = tl.cumsum(is_routed, 0) - 1
    place = tl.load(places + row, mask=is_routed > 0, other=0)
    tl.store(order + token * each + number, place, mask=is_routed > 0)


@triton.jit
def _sum_of_token(values, order, out, each, columns, TILE: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_column = column < columns
    kind = out.dtype.element_ty
    total = tl.zeros([TILE], tl.float32)
    for number in range(each):
        pair = tl.load(order + token * each + number)
        term = tl.load(values + pair * columns + column, mask=is_column, other=0.0).to(tl.float32)
        total = (total + term).to(kind).to(tl.float32)  # rounded after each sum, as PyTorch's operators do
    tl.store(out + token * columns + column, total.to(kind), mask=is_column)


@operator("expert_pairs", lambda map_, counts, each: [counts.new_empty(len(map_) * each) for _ in range(3)])
def expert_pairs(routing_map: Tensor, counts: Tensor, each: int) -> list[Tensor]:
    """(places of the pairs' gates in the flattened [T, E], their tokens, the pairs of each token), all [P] int64.

    Pairs are ordered by expert, those of an expert by token; the third result by token, those of a token by expert.

    Args:
        routing_map: [T, E] bool, contiguous, with `each` experts of each token.
        counts: [E] int64 tokens of each expert.
    """
    count, experts = routing_map.shape
    gates, tokens, order = (counts.new_empty(count * each) for _ in range(3))
    places, tile = counts.new_empty(count, experts), triton.next_power_of_2(experts)
    if count:
        _pairs_of_expert[experts,](
            routing_map, counts, gates, tokens, places, count, experts, EXPERT_TILE=tile, TOKEN_TILE=TOKEN_TILE
        )
        _pairs_of_token[count,](routing_map, places, order, each, experts, EXPERT_TILE=tile)
    return [gates, tokens, order]


@operator("sum_pairs", lambda values, order, tokens: values.new_empty(tokens, values.shape[1]))
def sum_pairs(values: Tensor, order: Tensor, tokens: int) -> Tensor:
    """Contiguous values [P, H] of pairs, and the pairs of each token [P] -> [T, H]: sums, one value after another."""
    out = values.new_empty(tokens, values.shape[1])
    if out.numel():
        grid = tokens, triton.cdiv(out.shape[1], CHANNEL_TILE)
        _sum_of_token[grid](values, order, out, len(order) // tokens, out.shape[1], TILE=CHANNEL_TILE)
    return out
