"""Rows of logits, one program a row: sums for the softmax and the gradient of scores, one pass each; a token by inverse
CDF with its log-probability, or that of a known token; and the random numbers that tokens are drawn by.

In single operators they take some twenty passes over fp32 logits. A row's sums run over tiles of fixed size, one after
another, so they, and the row's token, do not depend on other rows. A deterministic run needs no cumulative sum of
torch's, which is refused on CUDA. Shapes: n rows of V columns, of which the first c are tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.algorithms.token_sampling import GOLDEN_GAMMA, MULTIPLIERS
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


# -- sampling --------------------------------------------------------------------------------------------------------


SAMPLED_TILE = 2048  # columns that a program of sampling reads at a time
NUMBER_TILE = 128  # numbers of a program
_GAMMA, _FIRST, _SECOND = (tl.constexpr(value) for value in (GOLDEN_GAMMA, *MULTIPLIERS))


@triton.jit
def _uniform_tile(keys, positions, numbers, count, TILE: tl.constexpr):
    """SplitMix64, as `algorithms.token_sampling.uniforms`."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_row = row < count
    steps = (tl.load(positions + row, mask=is_row, other=0) + 1).to(tl.uint64, bitcast=True)
    state = tl.load(keys + row, mask=is_row, other=0).to(tl.uint64, bitcast=True) + steps * _GAMMA
    state = (state ^ (state >> 30)) * _FIRST
    state = (state ^ (state >> 27)) * _SECOND
    state = state ^ (state >> 31)
    number = ((state >> 12).to(tl.int64, bitcast=True).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^−52
    tl.store(numbers + row, number, mask=is_row)


@operator("uniform_rows", lambda keys, positions: keys.new_empty(keys.shape, dtype=torch.float64))
def uniform_rows(keys: Tensor, positions: Tensor) -> Tensor:
    """[n] float64: the number of each stream, by keys [n] int64, at its position [n] int64."""
    numbers = keys.new_empty(keys.shape, dtype=torch.float64)
    if count := len(keys):
        _uniform_tile[triton.cdiv(count, NUMBER_TILE),](keys, positions, numbers, count, TILE=NUMBER_TILE)
    return numbers


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
        logits, numbers, temperatures, greedy, tokens, logprobs, logits.stride(0), columns, TILE=SAMPLED_TILE
    )
    return tokens, logprobs


@operator("row_logprobs", lambda logits, *_: logits.new_empty(len(logits), dtype=torch.float32))
def row_logprobs(logits: Tensor, tokens: Tensor, temperature: float, columns: int) -> Tensor:
    """Returns [n] fp32 log-probabilities of tokens [n] int64, with the bits that `sample_rows` gives them.

    `temperature`: of all rows. Other arguments as of `sample_rows`. Not differentiable.
    """
    logprobs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _logprob_row[len(logits),](logits, tokens, logprobs, logits.stride(0), temperature, columns, TILE=SAMPLED_TILE)
    return logprobs
