"""Rotary embeddings of training's queries and keys (2104.09864 §3.4.2), and their gradients, one launch each.

It rounds as Megatron's single operators and as decode steps do, so the bits are the same.
Shapes: T tokens, H query heads, G key heads, D channels per head, r of them rotated.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl.mcore.kernels.cuda.rotate_and_store import OPTIONS, rotate

HEAD_TILE = 8  # heads of a program


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
    tables = cosines + token * ROTATED, sines + token * ROTATED
    values = rotate(source, *tables, channel, is_there, is_there & (channel < ROTATED), ROTATED, IS_BACKWARD)
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


@torch.library.custom_op("megarl::rotate_heads", mutates_args=())
def rotate_heads(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, is_backward: bool) -> list[Tensor]:
    """Returns rotated queries and keys in memory of their own; `is_backward`: turned back, as their gradients are.

    Args:
        query, key: [T, H, D] and [T, G, D].
        cosines, sines: [T, 1, r] of the tokens, contiguous, as in `Rotation`.
    """
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    out = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key)]
    (tokens, heads, channels), groups = query.shape, key.shape[1]
    if tokens:
        _rotate_heads[tokens, triton.cdiv(heads, HEAD_TILE) + triton.cdiv(groups, HEAD_TILE)](
            query, key, *out, cosines, sines, heads, groups, *query.stride()[:2], *key.stride()[:2],
            HEAD_TILE=HEAD_TILE, CHANNELS=channels, CHANNEL_TILE=triton.next_power_of_2(channels),
            ROTATED=cosines.shape[-1], IS_BACKWARD=is_backward, **OPTIONS,
        )  # fmt: skip
    return out


@rotate_heads.register_fake
def _(query, key, cosines, sines, is_backward):
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key)]
