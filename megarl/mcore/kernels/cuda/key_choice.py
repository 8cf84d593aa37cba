"""The choice of keys by a lightning indexer, and attention to latents by their rows: decode steps, scoring, training.

Scores: one program for each query and tile of keys; a product sums over the channels, and the heads are added in a
fixed order, so that a score depends on its query and its key alone. Choice: one program per query finds the border
digit by digit (a radix select on the bits of the scores, in the order of the numbers), takes what is above it, and of
equal scores the first positions; a query that sees no more keys than it may choose takes all. Attention: one program
for each query and tile of heads reads latents, tile by tile, which are keys and values of all heads (2405.04434 §2.1,
absorbed). Nothing depends on other queries.
The keys of query i are rows[first[i]], … of `seen[i]` positions, so that queries of a segment share its rows.
Shapes: n queries with I heads of the indexer and C channels, at most K keys of a query, W words of 8 bits, R rows; A
heads of attention, L numbers of a latent and r of its rotated key.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.mcore.kernels.cuda import operator

KEY_TILE = 128  # keys whose scores a program computes
CHOICE_TILE = 1024  # scores that a program of the choice reads at a time
LIST_TILE = 32  # keys that a program of the attention reads at a time
HEAD_TILE = 16  # heads of a program of the attention; minimum rows of a matrix product
DIGIT = 4  # bits of a digit of the radix select


@triton.jit
def _score_keys(
    heads,
    weights,
    keys,
    rows,
    first,
    seen,
    scores,
    key_row,
    width,
    count,
    scale,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Scores Σ_h w_h · max(0, q_h · k · scale) of a query and a tile of keys."""
    query, position = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    head, channel, limit = tl.arange(0, HEAD_TILE), tl.arange(0, CHANNEL_TILE), tl.load(seen + query)
    if (tl.program_id(1) * TILE >= limit) | (limit <= count):
        return
    is_channel, is_seen = channel < CHANNELS, position < limit
    own = heads + (query * HEADS + head[:, None]) * CHANNELS + channel[None, :]
    q = tl.load(own, mask=(head < HEADS)[:, None] & is_channel[None, :], other=0.0)
    row = tl.load(rows + tl.load(first + query) + position, mask=is_seen, other=0).to(tl.int64)
    k = tl.load(
        keys + row[:, None] * key_row + channel[None, :], mask=is_seen[:, None] & is_channel[None, :], other=0.0
    )
    product = tl.maximum(tl.dot(q, tl.trans(k), input_precision="ieee") * scale, 0.0)
    weight = tl.load(weights + query * HEADS + head, mask=head < HEADS, other=0.0)
    score = tl.sum(product * weight[:, None], 0) + 0.0  # −0 becomes 0
    tl.store(scores + query * width + position, score, mask=is_seen)


@triton.jit
def _ordered(score):
    """The bits of fp32 numbers as whole numbers in the same order, NaN above all others."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000


@triton.jit
def _choose_keys(scores, seen, bits, width, words, count, TILE: tl.constexpr, DIGIT: tl.constexpr, WORD: tl.constexpr):
    """Bits of the `count` keys of a query with the largest scores, or of all that it sees."""
    query = tl.program_id(0).to(tl.int64)
    own, limit, offset = scores + query * width, tl.load(seen + query), tl.arange(0, TILE)
    digit = tl.arange(0, 2**DIGIT)
    border, missing = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64) + count  # of what is equal in the first digits
    scored = tl.where(limit > count, limit, 0)  # of other queries there are no scores
    for number in tl.static_range(32 // DIGIT):
        shift = 32 - DIGIT * (number + 1)
        found = tl.zeros([2**DIGIT], tl.int64)
        for start in range(0, scored, TILE):
            is_seen = start + offset < limit
            x = _ordered(tl.load(own + start + offset, mask=is_seen, other=0.0)) >> shift
            is_equal = is_seen & ((x >> DIGIT) == border)
            found += tl.sum((is_equal[:, None] & ((x & (2**DIGIT - 1))[:, None] == digit[None, :])).to(tl.int64), 0)
        reached = tl.sum(tl.where(digit[:, None] >= digit[None, :], found[:, None], 0), 0)  # with at least this digit
        largest = tl.max(tl.where(reached >= missing, digit, 0), 0)
        missing -= tl.sum(tl.where(digit > largest, found, 0), 0)
        border = border * 2**DIGIT + largest
    byte, place = tl.arange(0, TILE // WORD), 1 << tl.arange(0, WORD)
    for start in range(0, limit, TILE):
        is_seen = start + offset < limit
        x = _ordered(tl.load(own + start + offset, mask=is_seen, other=0.0))
        is_equal = is_seen & (x == border)
        is_chosen = (is_seen & (x > border)) | (is_equal & (tl.cumsum(is_equal.to(tl.int64), 0) <= missing))
        is_chosen = is_chosen | (is_seen & (limit <= count))
        missing -= tl.sum(is_equal.to(tl.int64), 0)
        packed = tl.sum(tl.reshape(is_chosen.to(tl.int32), [TILE // WORD, WORD]) * place[None, :], 1)
        index = start // WORD + byte
        tl.store(bits + query * words + index, packed.to(tl.uint8), mask=index < words)


@triton.jit
def _list_rows(bits, rows, first, seen, lists, words, count, TILE: tl.constexpr):
    """The rows of a query's chosen keys, in ascending order of positions."""
    query, offset, before = tl.program_id(0).to(tl.int64), tl.arange(0, TILE), tl.full([], 0, tl.int64)
    own, limit = rows + tl.load(first + query), tl.load(seen + query)
    for start in range(0, limit, TILE):
        position = start + offset
        byte = tl.load(bits + query * words + position // 8, mask=position < limit, other=0).to(tl.int32)
        is_chosen = (byte >> (position % 8)) & 1
        place = before + tl.cumsum(is_chosen.to(tl.int64), 0) - 1
        is_written = (is_chosen == 1) & (place < count)
        row = tl.load(own + position, mask=is_written, other=0)
        tl.store(lists + query * count + place, row.to(tl.int32), mask=is_written)
        before += tl.sum(is_chosen.to(tl.int64), 0)


@triton.jit
def _attend_rows(
    query,
    latents,
    rows,
    first,
    seen,
    out,
    log_sums,
    latent_row,
    scale,
    HEADS: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_TILE: tl.constexpr,
    TURNED: tl.constexpr,
    TURNED_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attention of some heads of a query to the latents that it sees; 0 if it sees none."""
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    plain, turned, is_head = tl.arange(0, LATENT_TILE), tl.arange(0, TURNED_TILE), head < HEADS
    is_plain, is_turned = plain < LATENT, turned < TURNED
    heads = query + (number * HEADS + head[:, None]) * (LATENT + TURNED)
    q = tl.load(heads + plain[None, :], mask=is_head[:, None] & is_plain[None, :], other=0.0)
    q_turned = tl.load(heads + LATENT + turned[None, :], mask=is_head[:, None] & is_turned[None, :], other=0.0)
    top = tl.full([HEAD_TILE], -float("inf"), tl.float32)
    sum_ = tl.zeros([HEAD_TILE], tl.float32)
    weighted = tl.zeros([HEAD_TILE, LATENT_TILE], tl.float32)
    own, limit = rows + tl.load(first + number), tl.load(seen + number)
    for start in range(0, limit, TILE):
        place = start + tl.arange(0, TILE)
        is_key = place < limit
        row = tl.load(own + place, mask=is_key, other=0).to(tl.int64)[:, None] * latent_row
        k = tl.load(latents + row + plain[None, :], mask=is_key[:, None] & is_plain[None, :], other=0.0)
        turned_key = latents + row + LATENT + turned[None, :]
        k_turned = tl.load(turned_key, mask=is_key[:, None] & is_turned[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        score = tl.dot(q_turned, tl.trans(k_turned), score, input_precision="ieee") * scale
        score = tl.where(is_key[None, :], score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight, factor = tl.exp(score - higher[:, None]), tl.exp(top - higher)
        weighted = tl.dot(weight.to(k.dtype), k, weighted * factor[:, None], input_precision="ieee")
        sum_, top = sum_ * factor + tl.sum(weight, 1), higher
    result = (weighted / tl.where(sum_ > 0, sum_, 1.0)[:, None]).to(out.dtype.element_ty)
    place = out + (number * HEADS + head[:, None]) * LATENT + plain[None, :]
    tl.store(place, result, mask=is_head[:, None] & is_plain[None, :])
    tl.store(log_sums + number * HEADS + head, top + tl.log(sum_), mask=is_head)


def _empty_bits(heads, weights, keys, rows, first, seen, count, width):
    return heads.new_empty(len(heads), -(-width // 8), dtype=torch.uint8)


@operator("choose_key_bits", _empty_bits)
def choose_key_bits(
    heads: Tensor, weights: Tensor, keys: Tensor, rows: Tensor, first: Tensor, seen: Tensor, count: int, width: int
) -> Tensor:
    """Returns bits [n, ⌈K/8⌉] uint8 of the `count` keys that each query chooses, the first key in the lowest bit.

    Args:
        heads: [n, I, C], contiguous.
        weights: [n, I] fp32, contiguous.
        keys: [T', C] with contiguous channels, of the heads' type.
        rows: [R] int64 rows of the keys.
        first, seen: [n] int64.
        width: K.
    """
    total, count_of_heads, channels = heads.shape
    bits = _empty_bits(heads, weights, keys, rows, first, seen, count, width)
    scores = heads.new_empty(total, width, dtype=torch.float32)
    bits.zero_()  # of keys that a query does not see
    sizes = {"HEADS": count_of_heads, "HEAD_TILE": max(16, triton.next_power_of_2(count_of_heads))}
    sizes |= {"CHANNELS": channels, "CHANNEL_TILE": max(16, triton.next_power_of_2(channels)), "TILE": KEY_TILE}
    _score_keys[total, triton.cdiv(width, KEY_TILE)](
        heads, weights, keys, rows, first, seen, scores, keys.stride(0), width, count, channels**-0.5, **sizes
    )
    _choose_keys[(total,)](scores, seen, bits, width, bits.shape[1], count, TILE=CHOICE_TILE, DIGIT=DIGIT, WORD=8)
    return bits


@operator("list_key_rows", lambda bits, rows, first, seen, count: rows.new_empty(len(bits), count, dtype=torch.int32))
def list_key_rows(bits: Tensor, rows: Tensor, first: Tensor, seen: Tensor, count: int) -> Tensor:
    """Bits [n, ⌈K/8⌉] and the others as of `choose_key_bits` -> the chosen rows [n, count] int32, by ascending
    positions; of a query that sees fewer, then zeros."""
    lists = rows.new_zeros(len(bits), count, dtype=torch.int32)
    _list_rows[(len(bits),)](bits, rows, first, seen, lists, bits.shape[1], count, TILE=CHOICE_TILE)
    return lists


def _empty_attended(query, latents, rows, first, seen, width, scale):
    out = query.new_empty(*query.shape[:2], width)
    return [out, query.new_empty(query.shape[:2], dtype=torch.float32)]


@operator("attend_rows", _empty_attended)
def attend_rows(
    query: Tensor, latents: Tensor, rows: Tensor, first: Tensor, seen: Tensor, width: int, scale: float
) -> list[Tensor]:
    """Returns attention [n, A, L] of absorbed queries [n, A, L + r] to the latents that each sees; log-sums [n, A].

    Args:
        latents: [T', L + r] with contiguous numbers, of which the first L = `width` are values.
        rows: [R] int32 or int64.
        first, seen: [n] int64.
        scale: factor of the scores.
    """
    query, (total, heads, channels) = query.contiguous(), query.shape
    out, log_sums = _empty_attended(query, latents, rows, first, seen, width, scale)
    sizes = {"HEADS": heads, "HEAD_TILE": HEAD_TILE, "LATENT": width, "TURNED": channels - width, "TILE": LIST_TILE}
    for name, size in (("LATENT_TILE", width), ("TURNED_TILE", channels - width)):
        sizes[name] = max(16, triton.next_power_of_2(size))
    if total:
        _attend_rows[total, triton.cdiv(heads, HEAD_TILE)](
            query, latents, rows, first, seen, out, log_sums, latents.stride(0), scale, **sizes
        )
    return [out, log_sums]
