"""Samples a token from each row of logits by inverse CDF, with its log-probability, or gives that of a known token: one
program per row.

A row's sums run over tiles of fixed size, one after another, so its token and bits do not depend on other rows, and a
deterministic run needs no cumulative sum of torch's, which is refused on CUDA.
Shapes: n rows, V columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.mcore.kernels.cuda import operator
from megarl.mcore.kernels.cuda.head_rows import scaled

TILE = 2048  # columns that a program reads at a time


@triton.jit
def _row_total(logits, top, temperature, columns, TILE: tl.constexpr):
    """Σ e^(scaled logit − top) of a row: fp32 within a tile, fp64 over tiles."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, columns, TILE):
        total += tl.sum(tl.exp(scaled(logits, start, temperature, columns, TILE)[0] - top), 0).to(tl.float64)
    return total


@triton.jit
def _logprob(logits, token, top, total, temperature):
    """Log-probability of one token of a row, from its largest scaled logit and total."""
    chosen = tl.load(logits + token).to(tl.float32) / temperature
    return ((chosen - top).to(tl.float64) - tl.log(total)).to(tl.float32)


@triton.jit
def _logprob_row(logits, tokens, logprobs, row_stride, temperature, columns, TILE: tl.constexpr):
    row = tl.program_id(0)
    place = logits + row.to(tl.int64) * row_stride
    top = tl.full([], -float("inf"), tl.float32)
    for start in range(0, columns, TILE):
        top = tl.maximum(top, tl.max(scaled(place, start, temperature, columns, TILE)[0], 0))
    total = _row_total(place, top, temperature, columns, TILE)
    tl.store(logprobs + row, _logprob(place, tl.load(tokens + row), top, total, temperature))


@triton.jit
def _sample_row(logits, numbers, temperatures, greedy, tokens, logprobs, row_stride, columns, TILE: tl.constexpr):
    row = tl.program_id(0)
    place = logits + row.to(tl.int64) * row_stride
    temperature, is_greedy = tl.load(temperatures + row), tl.load(greedy + row)
    top = tl.full([], -float("inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    for start in range(0, columns, TILE):
        value, _ = scaled(place, start, temperature, columns, TILE)
        highest = tl.max(value, 0)
        if is_greedy:
            token = tl.where(highest > top, start + tl.argmax(value, 0), token)
        top = tl.maximum(top, highest)
    total = _row_total(place, top, temperature, columns, TILE)
    if is_greedy == 0:
        target = tl.load(numbers + row) * total
        before = tl.full([], 0.0, tl.float64)
        tile, mass_before_tile = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float64)
        for start in range(0, columns, TILE):
            mass = tl.sum(tl.exp(scaled(place, start, temperature, columns, TILE)[0] - top), 0).to(tl.float64)
            # The last tile that has mass and whose mass begins at or below the target.
            is_later = (before <= target) & (mass > 0)
            tile, mass_before_tile = tl.where(is_later, start, tile), tl.where(is_later, before, mass_before_tile)
            before += mass
        weight = tl.exp(scaled(place, tile, temperature, columns, TILE)[0] - top)
        cumulative = tl.cumsum(weight.to(tl.float64), 0)
        column = tl.arange(0, TILE)
        last = tl.max(tl.where(weight > 0, column, 0), 0)  # rounding may put the target behind all mass
        passed = tl.sum((mass_before_tile + cumulative <= target).to(tl.int32), 0)
        token = tile + tl.minimum(passed, last)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, _logprob(place, token, top, total, temperature))


def _empty_tokens(logits, *_):
    return logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits), dtype=torch.float32)


@operator("sample_rows", _empty_tokens)
def sample_rows(
    logits: Tensor, numbers: Tensor, temperatures: Tensor, greedy: Tensor, columns: int
) -> tuple[Tensor, Tensor]:
    """Returns a token of each row [n] int64, and its log-probability [n] fp32 over the whole vocabulary.

    Args:
        logits: [n, ≥ V], each row contiguous; all tensors are on one device.
        numbers: [n] float64 uniform numbers.
        temperatures: [n] fp32; they divide the logits.
        greedy: [n] int32; 1: take the row's largest logit, of equal ones the first, whatever its number.
        columns: V; later columns are padding.
    """
    tokens, logprobs = _empty_tokens(logits)
    _sample_row[len(logits),](
        logits, numbers, temperatures, greedy, tokens, logprobs, logits.stride(0), columns, TILE=TILE
    )
    return tokens, logprobs


@operator("row_logprobs", lambda logits, *_: logits.new_empty(len(logits), dtype=torch.float32))
def row_logprobs(logits: Tensor, tokens: Tensor, temperature: float, columns: int) -> Tensor:
    """Returns [n] fp32 log-probabilities of tokens [n] int64, with the bits that `sample_rows` gives them.

    `temperature`: of all rows. Other arguments as of `sample_rows`. Not differentiable.
    """
    logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _logprob_row[len(logits),](logits, tokens, logprobs, logits.stride(0), temperature, columns, TILE=TILE)
    return logprobs
