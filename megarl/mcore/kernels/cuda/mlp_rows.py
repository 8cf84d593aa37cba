"""Kernels of MLPs and experts: SwiGLU, also times the gates of its rows, and their gradients, one launch each; pairs of
tokens and their experts, where each lies in the order of the experts, and sums of a token's results. Before them the
choice of a token's experts and their gates, from the logits of its router.

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


# -- times gates -------------------------------------------------------------------------------------------------------


@triton.jit
def _place(places, row, HAS_PLACES: tl.constexpr):
    """Where a row's gate is."""
    place = row
    if HAS_PLACES:
        place = tl.load(places + row)
    return place


@triton.jit
def _swiglu_gated(x, gates, places, out, columns, TILE: tl.constexpr, HAS_PLACES: tl.constexpr):
    gate, up, is_column = _halves(x, columns, TILE)
    number = tl.program_id(0).to(tl.int64)
    kind = out.dtype.element_ty
    weight = tl.load(gates + _place(places, number, HAS_PLACES)).to(tl.float32)
    activated = (gate * tl.sigmoid(gate) * up).to(kind).to(tl.float32)  # rounded as by `_swiglu`
    place = out + number * columns + tl.program_id(1) * TILE + tl.arange(0, TILE)
    tl.store(place, (activated * weight).to(kind), mask=is_column)


@triton.jit
def _swiglu_gated_backward(
    grad, x, gates, places, grad_x, grad_gates, gated, columns, TILE: tl.constexpr, HAS_PLACES: tl.constexpr
):
    """One row: the gradient of its gate is a sum over all columns."""
    number = tl.program_id(0).to(tl.int64)
    kind = grad_x.dtype.element_ty
    own_gate = _place(places, number, HAS_PLACES)
    weight, sums = tl.load(gates + own_gate).to(tl.float32), tl.zeros([TILE], tl.float32)
    for start in range(0, columns, TILE):
        column = start + tl.arange(0, TILE)
        is_column, place = column < columns, number * columns + column
        first = x + number * 2 * columns + column
        gate = tl.load(first, mask=is_column, other=0.0).to(tl.float32)
        up = tl.load(first + columns, mask=is_column, other=0.0).to(tl.float32)
        grad_out = tl.load(grad + place, mask=is_column, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        activated, scaled = gate * sigmoid, grad_out * weight
        sums += grad_out * activated * up
        own = (activated * up).to(kind).to(tl.float32)
        tl.store(gated + place, (own * weight).to(kind), mask=is_column)
        target = grad_x + number * 2 * columns + column
        tl.store(target, (scaled * up * sigmoid * (1 + gate * (1 - sigmoid))).to(kind), mask=is_column)
        tl.store(target + columns, (scaled * activated).to(kind), mask=is_column)
    tl.store(grad_gates + own_gate, tl.sum(sums, 0).to(grad_gates.dtype.element_ty))


@operator("swiglu_gated", lambda x, gates, places: x.new_empty(len(x), x.shape[1] // 2))
def swiglu_gated(x: Tensor, gates: Tensor, places: Tensor | None) -> Tensor:
    """Contiguous [n, 2F] -> [n, F]: `swiglu_rows` times the rows' gates, and rounded again.

    gates: [n], or any number of them, of which `places` [n] int64 are the rows'.
    """
    out = x.new_empty(len(x), x.shape[1] // 2)
    if out.numel():
        _swiglu_gated[_grid(*out.shape)](x, gates, places, out, out.shape[1], TILE=TILE, HAS_PLACES=places is not None)
    return out


def _empty_gradients(grad, x, gates, places):
    return [torch.empty_like(x), torch.zeros_like(gates), torch.empty_like(grad)]


@operator("swiglu_gated_backward", _empty_gradients)
def swiglu_gated_backward(grad: Tensor, x: Tensor, gates: Tensor, places: Tensor | None) -> list[Tensor]:
    """The gradients of contiguous x [n, 2F] and of the gates, from that of the results [n, F], contiguous, too; and the
    results again. Gates that no row has get 0."""
    out = _empty_gradients(grad, x, gates, places)
    if grad.numel():
        rows, columns = grad.shape
        _swiglu_gated_backward[rows,](
            grad, x, gates, places, out[0], out[1], out[2], columns, TILE=TILE, HAS_PLACES=places is not None
        )
    return out


# -- routes ----------------------------------------------------------------------------------------------------------


@triton.jit
def _softmax(logit, is_there):
    weight = tl.where(is_there, tl.exp(logit - tl.max(tl.where(is_there, logit, -float("inf")), 0)), 0.0)
    return weight / tl.sum(weight, 0)


@triton.jit
def _route_token(
    logits,
    bias,
    given,
    probs,
    routing_map,
    chosen_experts,
    experts,
    scale,
    EACH: tl.constexpr,
    KIND: tl.constexpr,
    EXPERT_TILE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GIVEN: tl.constexpr,
):
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERT_TILE)
    is_expert, row = column < experts, token * experts + column
    logit = tl.load(logits + row, mask=is_expert, other=-float("inf")).to(tl.float32)
    score = logit
    if KIND == "softmax_first":
        score = _softmax(logit, is_expert)
    elif KIND == "sigmoid":
        score = tl.sigmoid(logit)
    chosen = column < 0
    if HAS_GIVEN:
        for number in range(EACH):
            chosen = chosen | (column == tl.load(given + token * EACH + number))
    else:
        key = score
        if HAS_BIAS:
            key += tl.load(bias + column, mask=is_expert, other=0.0)
        # Every token has k experts, also where a number is NaN or −∞.
        key = tl.where(key != key, float("inf"), tl.maximum(key, -3.0e38))
        for _ in range(EACH):
            best = tl.argmax(tl.where(is_expert & (chosen == 0), key, -float("inf")), 0)  # of equal ones the first
            chosen = chosen | (column == best)
    gate = tl.where(chosen, score, 0.0)
    if KIND == "softmax":
        gate = _softmax(logit, chosen)
    elif KIND == "sigmoid" and EACH > 1:
        gate = gate / (tl.sum(gate, 0) + 1e-20)
    tl.store(probs + row, (gate * scale).to(probs.dtype.element_ty), mask=is_expert)
    tl.store(routing_map + row, chosen, mask=is_expert)
    number = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(chosen_experts + token * EACH + number, column.to(tl.int64), mask=chosen)


@triton.jit
def _route_gradient(
    grad_probs,
    logits,
    routing_map,
    grad_logits,
    experts,
    scale,
    EACH: tl.constexpr,
    KIND: tl.constexpr,
    EXPERT_TILE: tl.constexpr,
):
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERT_TILE)
    is_expert, row = column < experts, token * experts + column
    logit = tl.load(logits + row, mask=is_expert, other=-float("inf")).to(tl.float32)
    chosen = tl.load(routing_map + row, mask=is_expert, other=0) != 0
    grad = tl.load(grad_probs + row, mask=chosen, other=0.0).to(tl.float32) * scale
    if KIND == "sigmoid":
        score = tl.sigmoid(logit)
        if EACH > 1:
            total = tl.sum(tl.where(chosen, score, 0.0), 0) + 1e-20
            grad = tl.where(chosen, (grad - tl.sum(grad * score, 0) / total) / total, 0.0)
        result = grad * score * (1 - score)
    else:
        share = _softmax(logit, chosen if KIND == "softmax" else is_expert)
        result = share * (grad - tl.sum(share * grad, 0))
    tl.store(grad_logits + row, result.to(grad_logits.dtype.element_ty), mask=is_expert)


def _empty_routes(logits, bias, given, each, *_):
    probs = torch.empty_like(logits)
    return [probs, torch.empty_like(logits, dtype=torch.bool), logits.new_empty(len(logits), each, dtype=torch.int64)]


@operator("route", _empty_routes)
def route(
    logits: Tensor, bias: Tensor | None, given: Tensor | None, each: int, kind: str, scale: float
) -> list[Tensor]:
    """(gates [T, E] of a token's experts, else 0; which these are [T, E] bool; the same [T, k] int64, ascending).

    Args:
        logits: [T, E], contiguous.
        bias: [E] fp32, added to scores for the choice alone; None: none.
        given: [T, k] int64, contiguous: a token's experts; None: those of the k largest scores, of equal ones the
            first.
        each: k.
        kind: softmax: gates are a softmax of the logits of a token's experts; softmax_first: of all logits; sigmoid:
            sigmoids, over their sum if k > 1.
        scale: of the gates.
    """
    out, (tokens, experts) = _empty_routes(logits, bias, given, each), logits.shape
    if tokens:
        _route_token[tokens,](
            logits,
            bias,
            given,
            out[0],
            out[1],
            out[2],
            experts,
            scale,
            EACH=each,
            KIND=kind,
            HAS_BIAS=bias is not None,
            HAS_GIVEN=given is not None,
            **_expert_tile(experts),
        )
    return out


@operator("route_backward", lambda grad, logits, *_: torch.empty_like(logits))
def route_backward(grad: Tensor, logits: Tensor, routing_map: Tensor, each: int, kind: str, scale: float) -> Tensor:
    """The gradient [T, E] of the logits, from that of the gates, contiguous; other arguments as of `route`."""
    out, (tokens, experts) = torch.empty_like(logits), logits.shape
    if tokens:
        _route_gradient[tokens,](
            grad, logits, routing_map, out, experts, scale, EACH=each, KIND=kind, **_expert_tile(experts)
        )
    return out


def _expert_tile(experts: int) -> dict:
    tile = triton.next_power_of_2(experts)
    return {"EXPERT_TILE": tile, "num_warps": 1 if tile <= 256 else 4}


# -- pairs -----------------------------------------------------------------------------------------------------------


PAIR_TILE, CHANNEL_TILE = 8192, 1024  # tokens times experts, and channels, that a program reads at a time


@triton.jit
def _earlier(routing_map, token, expert, count, experts, EXPERT_TILE: tl.constexpr):
    """How many experts before this one each token has."""
    other = tl.arange(0, EXPERT_TILE)
    is_there = (token < count)[:, None] & (other < expert)[None, :]
    is_routed = tl.load(routing_map + token[:, None] * experts + other[None, :], mask=is_there, other=0)
    return tl.sum(is_routed.to(tl.int32), 1)


@triton.jit
def _pairs_of_expert(
    routing_map, gates, tokens, order, ends, count, experts, each, EXPERT_TILE: tl.constexpr, TOKEN_TILE: tl.constexpr
):
    expert, offset = tl.program_id(0), tl.arange(0, TOKEN_TILE).to(tl.int64)
    place = tl.full([], 0, tl.int64)  # of its next pair
    for start in range(0, count, TOKEN_TILE):
        place += tl.sum(_earlier(routing_map, start + offset, expert, count, experts, EXPERT_TILE), 0)
    for start in range(0, count, TOKEN_TILE):
        token = start + offset
        is_routed = tl.load(routing_map + token * experts + expert, mask=token < count, other=0).to(tl.int64)
        own, is_own = place + tl.cumsum(is_routed, 0) - 1, is_routed > 0
        number = _earlier(routing_map, token, expert, count, experts, EXPERT_TILE)
        tl.store(gates + own, token * experts + expert, mask=is_own)
        tl.store(tokens + own, token, mask=is_own)
        tl.store(order + token * each + number, own, mask=is_own)
        place += tl.sum(is_routed, 0)
    tl.store(ends + expert, place.to(tl.int32))


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


def _empty_pairs(routing_map, each):
    pairs = [routing_map.new_empty(len(routing_map) * each, dtype=torch.int64) for _ in range(3)]
    return [*pairs, routing_map.new_empty(routing_map.shape[1], dtype=torch.int32)]


@operator("expert_pairs", _empty_pairs)
def expert_pairs(routing_map: Tensor, each: int) -> list[Tensor]:
    """(places of the pairs' gates in the flattened [T, E], their tokens, the pairs of each token), all [P] int64; and
    the ends [E] int32 of the experts' pairs.

    Pairs are ordered by expert, those of an expert by token; the third result by token, those of a token by expert.

    Args:
        routing_map: [T, E] bool, contiguous, with `each` experts of each token.
    """
    (count, experts), out = routing_map.shape, _empty_pairs(routing_map, each)
    tile = triton.next_power_of_2(experts)
    _pairs_of_expert[experts,](
        routing_map,
        out[0],
        out[1],
        out[2],
        out[3],
        count,
        experts,
        each,
        EXPERT_TILE=tile,
        TOKEN_TILE=max(1, PAIR_TILE // tile),
    )
    return out


@operator("sum_pairs", lambda values, order, tokens: values.new_empty(tokens, values.shape[1]))
def sum_pairs(values: Tensor, order: Tensor, tokens: int) -> Tensor:
    """Contiguous values [P, H] of pairs, and the pairs of each token [P] -> [T, H]: sums, one value after another."""
    out = values.new_empty(tokens, values.shape[1])
    if out.numel():
        grid = tokens, triton.cdiv(out.shape[1], CHANNEL_TILE)
        _sum_of_token[grid](values, order, out, len(order) // tokens, out.shape[1], TILE=CHANNEL_TILE)
    return out
