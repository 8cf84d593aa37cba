"""Rotary embeddings of queries and keys (2104.09864 §3.4.2): of training, with their gradients, and of decode steps,
which also write new keys and values into the cache. One launch each.

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


# -- decode steps --------------------------------------------------------------------------------------------------


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
    tokens, groups, each, channels = heads.shape
    _rotate_and_store[tokens, groups](
        heads, cosines, sines, cache, slots, heads.stride(0), heads.stride(1), QUERIES=each - 2,
        HEAD_TILE=triton.next_power_of_2(each), CHANNELS=channels, CHANNEL_TILE=triton.next_power_of_2(channels),
        ROTATED=0 if cosines is None else cosines.shape[-1], **OPTIONS,
    )  # fmt: skip
