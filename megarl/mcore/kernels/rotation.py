"""Rotary embeddings of heads (2104.09864 §3.4.2), with the same bits in training and in the rollout engine.

Shapes: T tokens, H heads with D channels, r of them rotated. Cosines and sines are those of a
`megarl.mcore.model.decoder_layer.Rotation`, one for each token.
"""

import torch
from torch import Tensor

from megarl.mcore.kernels import native, with_gradient


def _rotated_heads_gradient(ctx, query_grad, key_grad):
    return *_rotated_heads(query_grad, key_grad, *ctx.saved_tensors, True), None, None


@with_gradient(_rotated_heads_gradient)
def rotated_heads(ctx, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, ...]:
    """Queries [T, H, D] and keys [T, G, D] rotated, in memory of their own; differentiable once.

    `cosines`, `sines`: [T, 1, r].
    """
    ctx.save_for_backward(cosines, sines)
    return tuple(_rotated_heads(query, key, cosines, sines, False))


def _rotated_heads(query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor, is_backward: bool) -> list[Tensor]:
    if query.is_cuda:
        from megarl.mcore.kernels.cuda.rotate_heads import rotate_heads  # needs Triton

        return rotate_heads(query, key, cosines, sines, is_backward)
    return [_rotated(heads, cosines, sines, is_backward) for heads in (query, key)]


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor, is_backward: bool) -> Tensor:
    """x · cos + swapped · sin, each rounded; of gradients x · cos + swapped (x · sin)."""
    if heads.stride(-1) == 1 and native.supports(heads, cosines, sines):
        out = torch.empty_like(heads, memory_format=torch.contiguous_format)
        native.ops.rotate(heads, cosines, sines, is_backward, out)
        return out
    turned, rest = heads.tensor_split((cosines.shape[-1],), dim=-1)
    swapped = _swapped(turned * sines) if is_backward else _swapped(turned) * sines
    return torch.cat([turned * cosines + swapped, rest], dim=-1)


def rotate_(heads: Tensor, cosines: Tensor, sines: Tensor):
    """Rotates [T, G, H, D] in place. `cosines`, `sines`: [T, 1, 1, r]."""
    if native.supports(heads, cosines, sines):
        return native.ops.rotate(heads, cosines, sines, False, heads)
    turned = heads[..., : cosines.shape[-1]]
    swapped = _swapped(turned)
    turned.mul_(cosines).add_(swapped.mul_(sines))


def _swapped(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([second, first], dim=-1)
