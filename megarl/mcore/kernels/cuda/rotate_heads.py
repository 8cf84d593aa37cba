"""Rotary embeddings of queries and keys (2104.09864 §3.4.2): of training, with their gradients, also of heads as their
product gives them; and of decode steps, which also write new keys and values into the cache. One launch each. Before
the layers of a decode step one more finds where in the cache they go.

They round as the single operators that they replace, Megatron's, `Rotation.apply_` and a copy: the bits are the same.
Shapes: T tokens, H query heads, G key/value groups of R query heads each, D channels per head, r of them rotated.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.mcore.kernels.cuda import operator

HEAD_TILE = 8  # heads of a program
# Otherwise the compiler fuses a product of 16 bits and the sum after it, without the rounding between them that
# PyTorch's operators do.
OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def rotate(heads, cosines, sines, channel, is_read, is_rotated, ROTATED: tl.constexpr, IS_BACKWARD: tl.constexpr):
    """Values at `heads + channel`, of which `is_rotated` are turned by a token's tables, or back."""
    own = tl.load(heads + channel, mask=is_read, other=0.0)
    kind = own.dtype
    other = tl.where(channel < ROTATED // 2, channel + ROTATED // 2, channel - ROTATED // 2)
    partner = tl.load(heads + other, mask=is_rotated, other=0.0)
    cosine = tl.load(cosines + channel, mask=channel < ROTATED, other=1.0).to(tl.float32)
    sine = tl.load(sines + channel, mask=channel < ROTATED, other=0.0).to(tl.float32)
    if IS_BACKWARD:
        sine = -sine
    first = (own.to(tl.float32) * cosine).to(kind).to(tl.float32)
    second = (partner.to(tl.float32) * sine).to(kind).to(tl.float32)
    return tl.where(is_rotated, (first + second).to(kind), own)


# -- training ------------------------------------------------------------------------------------------------------


@triton.jit
def _rotate_tile(
    x, out, cosines, sines, tile, heads, token_stride, head_stride,
    HEAD_TILE: tl.constexpr, CHANNELS: tl.constexpr, CHANNEL_TILE: tl.constexpr, ROTATED: tl.constexpr,
    IS_BACKWARD: tl.constexpr,
):  # fmt: skip
    """Some heads of one token, of queries or of keys."""
    token = tl.program_id(0).to(tl.int64)
    head, channel = tile * HEAD_TILE + tl.arange(0, HEAD_TILE)[:, None], tl.arange(0, CHANNEL_TILE)[None, :]
    is_there = (head < heads) & (channel < CHANNELS)
    source = x + token * token_stride + head * head_stride
    cosines, sines = cosines + token * ROTATED, sines + token * ROTATED
    values = rotate(source, cosines, sines, channel, is_there, is_there & (channel < ROTATED), ROTATED, IS_BACKWARD)
    tl.store(out + (token * heads + head) * CHANNELS + channel, values, mask=is_there)


@triton.jit
def _rotate_heads(
    query, key, query_out, key_out, cosines, sines, query_heads, key_heads,
    query_token, query_head, key_token, key_head,
    HEAD_TILE: tl.constexpr, CHANNELS: tl.constexpr, CHANNEL_TILE: tl.constexpr, ROTATED: tl.constexpr,
    IS_BACKWARD: tl.constexpr,
):  # fmt: skip
    tile, tiles = tl.program_id(1), tl.cdiv(query_heads, HEAD_TILE)
    if tile < tiles:
        _rotate_tile(query, query_out, cosines, sines, tile, query_heads, query_token, query_head,
                     HEAD_TILE, CHANNELS, CHANNEL_TILE, ROTATED, IS_BACKWARD)  # fmt: skip
    else:
        _rotate_tile(key, key_out, cosines, sines, tile - tiles, key_heads, key_token, key_head,
                     HEAD_TILE, CHANNELS, CHANNEL_TILE, ROTATED, IS_BACKWARD)  # fmt: skip


def _empty_heads(query, key, *_):
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key)]


@operator("rotate_heads", _empty_heads)
def rotate_heads(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, is_backward: bool) -> list[Tensor]:
    """Returns rotated queries and keys in memory of their own; `is_backward`: turned back, as their gradients are.

    Args:
        query, key: [T, H, D] and [T, G, D].
        cosines, sines: [T, 1, r] of the tokens, contiguous, as in `Rotation`.
    """
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    out = _empty_heads(query, key)
    (tokens, heads, channels), groups = query.shape, key.shape[1]
    if tokens:
        _rotate_heads[tokens, triton.cdiv(heads, HEAD_TILE) + triton.cdiv(groups, HEAD_TILE)](
            query, key, out[0], out[1], cosines, sines, heads, groups, *query.stride()[:2], *key.stride()[:2],
            HEAD_TILE=HEAD_TILE, CHANNELS=channels, CHANNEL_TILE=triton.next_power_of_2(channels),
            ROTATED=cosines.shape[-1], IS_BACKWARD=is_backward, **OPTIONS,
        )  # fmt: skip
    return out


# -- training, by groups -------------------------------------------------------------------------------------------


@triton.jit
def _turn(
    source,
    target,
    cosines,
    sines,
    token,
    head,
    heads,
    CHANNELS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    ROTATED: tl.constexpr,
    IS_BACKWARD: tl.constexpr,
):
    """Some heads of one token, turned or copied; `source` and `target`: where each begins."""
    channel = tl.arange(0, CHANNEL_TILE)[None, :]
    is_there = (head < heads) & (channel < CHANNELS)
    if ROTATED > 0:
        tables, is_rotated = token * ROTATED, is_there & (channel < ROTATED)
        values = rotate(source, cosines + tables, sines + tables, channel, is_there, is_rotated, ROTATED, IS_BACKWARD)
    else:
        values = tl.load(source + channel, mask=is_there, other=0.0)
    tl.store(target + channel, values, mask=is_there)


@triton.jit
def _split_group(
    heads,
    query,
    key,
    cosines,
    sines,
    token_stride,
    group_stride,
    QUERIES: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """One token's queries and key of one group."""
    token, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    head, number = tl.arange(0, HEAD_TILE)[:, None], token * groups + group
    own = heads + token * token_stride + group * group_stride + head * CHANNELS
    target = query + (number * QUERIES + head) * CHANNELS
    _turn(own, target, cosines, sines, token, head, QUERIES, CHANNELS, CHANNEL_TILE, ROTATED, False)
    own, target = own + QUERIES * CHANNELS, key + (number + head) * CHANNELS
    _turn(own, target, cosines, sines, token, head, 1, CHANNELS, CHANNEL_TILE, ROTATED, False)


@triton.jit
def _join_group(
    query,
    key,
    value,
    heads,
    cosines,
    sines,
    query_token,
    query_head,
    key_token,
    key_group,
    value_token,
    value_group,
    QUERIES: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
    CHANNEL_TILE: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """The gradients of one token's heads of one group, turned back."""
    token, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    head = tl.arange(0, HEAD_TILE)[:, None]
    place = heads + ((token * groups + group) * (QUERIES + 2) + head) * CHANNELS
    own = query + token * query_token + (group * QUERIES + head) * query_head
    _turn(own, place, cosines, sines, token, head, QUERIES, CHANNELS, CHANNEL_TILE, ROTATED, True)
    place += QUERIES * CHANNELS
    own = key + token * key_token + (group + head) * key_group
    _turn(own, place, cosines, sines, token, head, 1, CHANNELS, CHANNEL_TILE, ROTATED, True)
    own = value + token * value_token + (group + head) * value_group
    _turn(own, place + CHANNELS, cosines, sines, token, head, 1, CHANNELS, CHANNEL_TILE, 0, True)


def _split_empty(heads, *_):
    tokens, groups, each, channels = heads.shape
    return [heads.new_empty(tokens, groups * (each - 2), channels), heads.new_empty(tokens, groups, channels)]


@operator("split_heads", _split_empty)
def split_heads(heads: Tensor, cosines: Tensor | None, sines: Tensor | None) -> list[Tensor]:
    """Queries [T, G·R, D] and keys [T, G, D], rotated, in memory of their own.

    Args:
        heads: [T, G, R + 2, D]: the queries of each group, its key, its value; the last two sizes contiguous.
        cosines, sines: as of `rotate_heads`; None: nothing is rotated.
    """
    out = _split_empty(heads)
    if out[0].numel():
        _split_group[heads.shape[:2]](
            heads, out[0], out[1], cosines, sines, *heads.stride()[:2], **_sizes(heads, cosines)
        )
    return out


@operator(
    "join_heads",
    lambda query, key, *_: query.new_empty(*key.shape[:2], query.shape[1] // key.shape[1] + 2, key.shape[2]),
)
def join_heads(query: Tensor, key: Tensor, value: Tensor, cosines: Tensor | None, sines: Tensor | None) -> Tensor:
    """The gradient [T, G, R + 2, D] of the heads of `split_heads`, from those of queries, keys and values [T, G, D]."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    (tokens, groups, channels), each = key.shape, query.shape[1] // key.shape[1] + 2
    heads = query.new_empty(tokens, groups, each, channels)
    if heads.numel():
        _join_group[tokens, groups](
            query,
            key,
            value,
            heads,
            cosines,
            sines,
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            **_sizes(heads, cosines),
        )
    return heads


def _sizes(heads: Tensor, cosines: Tensor | None) -> dict:
    each, channels = heads.shape[2:]
    tiles = {"HEAD_TILE": triton.next_power_of_2(each), "CHANNEL_TILE": triton.next_power_of_2(channels)}
    rotated = 0 if cosines is None else cosines.shape[-1]
    return {"QUERIES": each - 2, "CHANNELS": channels, "ROTATED": rotated, **tiles, **OPTIONS}


# -- decode steps --------------------------------------------------------------------------------------------------


STEP_TILE = 64  # rows of a program


@triton.jit
def _begin_tile(
    sent_tokens, sent_positions, blocks, tokens, positions, lengths, slots, count, table_row, size, TILE: tl.constexpr
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_row = row < count
    sent = tl.load(sent_positions + row, mask=is_row, other=0)
    position = tl.maximum(sent, 0)
    block = tl.load(blocks + row * table_row + position // size, mask=is_row, other=0).to(tl.int64)
    tl.store(tokens + row, tl.load(sent_tokens + row, mask=is_row, other=0).to(tl.int64), mask=is_row)
    tl.store(positions + row, position.to(tl.int64), mask=is_row)
    tl.store(lengths + row, sent + 1, mask=is_row)
    tl.store(slots + row, block * size + position % size, mask=is_row)


@operator("begin_rows", lambda *_: None, mutates=("tokens", "positions", "lengths", "slots"))
def begin_rows(
    tokens: Tensor,
    positions: Tensor,
    lengths: Tensor,
    slots: Tensor,
    sent_tokens: Tensor,
    sent_positions: Tensor,
    blocks: Tensor,
    size: int,
) -> None:
    """Writes what the layers of a decode step of B rows read of each.

    Args:
        tokens, positions: [B] int64; positions of padding are 0.
        lengths: [B] int32 keys that a token sees; 0 in padding.
        slots: [B] int64 rows of the flattened cache for its key and value.
        sent_tokens, sent_positions: [B] int32; −1: padding.
        blocks: [B, P] int32 blocks of the cache, of `size` tokens each.
    """
    rows = len(sent_tokens)
    _begin_tile[triton.cdiv(rows, STEP_TILE),](
        sent_tokens,
        sent_positions,
        blocks,
        tokens,
        positions,
        lengths,
        slots,
        rows,
        blocks.stride(0),
        size,
        TILE=STEP_TILE,
    )


@triton.jit
def _rotate_and_store(
    heads, cosines, sines, cache, slots, token_stride, group_stride,
    QUERIES: tl.constexpr, HEAD_TILE: tl.constexpr, CHANNELS: tl.constexpr, CHANNEL_TILE: tl.constexpr,
    ROTATED: tl.constexpr,
):  # fmt: skip
    """One token's heads of one group."""
    token, group = tl.program_id(0), tl.program_id(1)
    head, channel = tl.arange(0, HEAD_TILE)[:, None], tl.arange(0, CHANNEL_TILE)[None, :]
    is_read = (head < QUERIES + 2) & (channel < CHANNELS)
    place = heads + token.to(tl.int64) * token_stride + group * group_stride + head * CHANNELS
    if ROTATED > 0:
        tables, is_rotated = token * ROTATED, is_read & (head <= QUERIES) & (channel < ROTATED)
        own = rotate(place, cosines + tables, sines + tables, channel, is_read, is_rotated, ROTATED, False)
    else:
        own = tl.load(place + channel, mask=is_read, other=0.0)
    tl.store(place + channel, own, mask=is_read & (head < QUERIES))
    slot = tl.load(slots + token)
    target = cache + (slot * tl.num_programs(1) + group) * 2 * CHANNELS + (head - QUERIES) * CHANNELS
    tl.store(target + channel, own, mask=is_read & (head >= QUERIES))


@torch.library.custom_op("megarl::rotate_and_store", mutates_args=("heads", "cache"))
def rotate_and_store(heads: Tensor, cosines: Tensor | None, sines: Tensor | None, cache: Tensor, slots: Tensor) -> None:
    """Rotates queries in place, and writes rotated keys, and values, to their slots of the cache.

    Args:
        heads: [T, G, R + 2, D], contiguous: the queries of each group, its key, its value.
        cosines, sines: [T, 1, 1, r] of the tokens, as in `Rotation`; None: nothing is rotated.
        cache: [slots, G, 2, D], contiguous.
        slots: [T] int64. Several tokens of padding may have one slot.
    """
    _rotate_and_store[heads.shape[:2]](
        heads, cosines, sines, cache, slots, heads.stride(0), heads.stride(1), **_sizes(heads, cosines)
    )
