"""Rotary position embeddings (2104.09864 §3.4.2): frequencies and their scalings, for layers with and without a window;
rotations of heads, with the same bits in training and in the rollout engine.

Scalings: linear (`--rotary-seq-len-interpolation-factor`), Llama 3's (`--use-rope-scaling`), YaRN (2309.00071 §3.4,
`--position-embedding-type yarn`), LongRoPE's (2402.13753, `--rotary-divisors` and `--rotary-attention-factor`). With
`--window-rotary-base` layers with a window have that base and no scaling.
Frequencies of both kinds of layers are then next to each other, because Megatron hands one tensor to all layers.
Shapes: T tokens, H heads with D channels, r of them rotated.
"""

import math
from typing import NamedTuple

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.attention.segments import FULL, WINDOW
from megarl.mcore.config.model_flags import divisors_of
from megarl.mcore.kernels import native, with_gradient


class Rotary(RotaryEmbedding):
    """Frequencies by position: [P, 1, 1, r] for the first r channels of a head, [P, 1, 1, 2r] if layers differ."""

    def __init__(self, args, config):
        torch.nn.Module.__init__(self)
        self.cp_group = None  # else it returns only Megatron's context-parallel slice
        on = "cpu" if config.use_cpu_initialization else device.device()
        channels = int(args.kv_channels * args.rotary_percent)
        if args.multi_latent_attention:
            channels = args.qk_pos_emb_head_dim
        self.exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=on) / channels
        self.position_scale = 1 / (args.rotary_seq_len_interpolation_factor or 1)
        divisors: float | Tensor = 1.0
        if args.rotary_divisors is not None:
            divisors = torch.tensor(divisors_of(args.rotary_divisors), dtype=torch.float32, device=on)
        inverse = self._inverse(args.rotary_base, divisors)
        if args.use_rope_scaling:
            inverse = self._apply_scaling(inverse, args.rope_scaling_factor, *_llama3_constants(args))
        if args.position_embedding_type == "yarn":
            inverse = _yarn(self.exponents, args.rotary_base, config)
        window = None if args.window_rotary_base is None else self._inverse(args.window_rotary_base)
        self.inverse = [x.to(device.device()) for x in (inverse, window) if x is not None]

    def _inverse(self, base: float, divisors: float | Tensor = 1.0) -> Tensor:
        return 1.0 / (divisors * base**self.exponents)

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Returns the frequencies of positions `offset` … `offset + max_seq_len − 1`."""
        positions = torch.arange(max_seq_len, device=self.inverse[0].device, dtype=torch.float32) + offset
        scales = [self.position_scale, 1.0]
        angles = [torch.outer(positions * scale, x) for scale, x in zip(scales, self.inverse, strict=False)]
        return torch.cat([half for each in angles for half in (each, each)], dim=-1)[:, None, None, :]


def _llama3_constants(args) -> tuple[float, float, int]:
    low, high = args.rope_low_freq_factor, args.rope_high_freq_factor
    length = args.rope_original_max_position_embeddings
    return 1.0 if low is None else low, 4.0 if high is None else high, 8192 if length is None else length


def _yarn(exponents: Tensor, base: float, config) -> Tensor:
    """Interpolates low frequencies by the factor, keeps high ones, with a linear ramp between them."""
    count, length = len(exponents), config.yarn_original_max_position_embeddings

    def channel(rotations: float) -> float:
        """The channel pair that turns so often over the original context."""
        return count * math.log(length / (rotations * 2 * math.pi)) / math.log(base)

    low, high = channel(config.yarn_beta_fast), channel(config.yarn_beta_slow)
    if config.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * count - 1)
    high += 0.001 if low == high else 0
    ramp = ((torch.arange(count, dtype=torch.float32, device=exponents.device) - low) / (high - low)).clamp(0, 1)
    wavelengths, kept = base**exponents, 1 - ramp
    return 1.0 / (config.yarn_rotary_scaling_factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def concentration(config, kind: int) -> float:
    """Returns the factor of cosines and sines in layers of this kind, YaRN's or LongRoPE's attention factor; else 1."""
    if config.rotary_attention_factor is not None:
        return config.rotary_attention_factor
    if not hasattr(config, "yarn_rotary_scaling_factor") or kind == WINDOW and config.window_rotary_base is not None:
        return 1.0

    def scale(mscale: float) -> float:
        factor = config.yarn_rotary_scaling_factor
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    return scale(config.yarn_mscale) / scale(config.yarn_mscale_all_dim)


def of_kind(frequencies: Tensor, config, kind: int) -> Tensor:
    """Returns the frequencies […, r] of layers of this kind among those of all layers."""
    return frequencies if config.window_rotary_base is None else frequencies.chunk(2, dim=-1)[kind]


def kinds(config) -> tuple[int, ...]:
    """Returns the kinds of layers whose rotations differ; `FULL` alone if all are the same."""
    return (FULL,) if config.window_rotary_base is None else (FULL, WINDOW)


# -- rotations ---------------------------------------------------------------------------------------------------------


class Rotation(NamedTuple):
    """Rotary cosines and sines of the first r channels of a head (2104.09864 §3.4.2), by position [P, 1, 1, r], or by
    token of a micro-batch [T, 1, r]."""

    cosines: Tensor
    sines: Tensor  # negated in the first half, which multiplies the second half's channels

    @classmethod
    def of(cls, frequencies: Tensor, dtype: torch.dtype, factor: float = 1.0) -> "Rotation":
        """Builds it from Megatron's frequencies [P, 1, 1, r] of all positions; `factor` of cosines and sines."""
        sines = frequencies.sin() * factor
        sines[..., : sines.shape[-1] // 2].neg_()
        return cls((frequencies.cos() * factor).to(dtype), sines.to(dtype))

    @classmethod
    def by_kind(cls, frequencies: Tensor, config, dtype: torch.dtype) -> "list[Rotation]":
        """Builds one from the frequencies of all layers, or two if layers with a window have another."""
        return [
            cls.of(of_kind(frequencies, config, kind), dtype, concentration(config, kind)) for kind in kinds(config)
        ]

    def at(self, positions: Tensor, axes: Tensor | None = None) -> "Rotation":
        """Returns the rotation of positions [T], or [3, T] with `axes`: [r] which of the three turns each channel."""
        if positions.dim() == 1:
            return Rotation(self.cosines[positions], self.sines[positions])
        return Rotation(*(_of_axes(table[positions], axes) for table in self))

    def apply_(self, heads: Tensor):
        """Rotates [T, G, heads, D] in place; the bits equal those in training."""
        if native.supports(heads, self.cosines, self.sines):
            return native.ops.rotate(heads, self.cosines, self.sines, False, heads)
        turned = heads[..., : self.cosines.shape[-1]]
        swapped = _swapped(turned)
        turned.mul_(self.cosines).add_(swapped.mul_(self.sines))


def _of_axes(turns: Tensor, axes: Tensor) -> Tensor:
    """[3, …, r] by axis -> […, r], each channel of its own axis."""
    time, height, width = turns
    axes = axes.to(turns.device)
    return torch.where(axes == 0, time, torch.where(axes == 1, height, width))


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


def _split_heads_gradient(ctx, query_grad, key_grad, value_grad):
    from megarl.mcore.kernels.cuda.rotate_heads import join_heads  # needs Triton

    return join_heads(query_grad, key_grad, value_grad, *ctx.tables), None, None


@with_gradient(_split_heads_gradient)
def split_heads(ctx, heads: Tensor, cosines: Tensor | None, sines: Tensor | None) -> tuple[Tensor, ...]:
    """Heads [T, G, R + 2, D] of a CUDA device, as a product gives them -> queries [T, G·R, D] and keys [T, G, D],
    rotated as by `rotated_heads`, and values [T, G, D], a view; differentiable once. `cosines` None: not rotated."""
    from megarl.mcore.kernels.cuda.rotate_heads import split_heads  # needs Triton

    ctx.tables = cosines, sines
    query, key = split_heads(heads, cosines, sines)
    return query, key, heads[:, :, -1]


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor, is_backward: bool) -> Tensor:
    """x · cos + swapped · sin, each rounded; of gradients x · cos + swapped (x · sin)."""
    if heads.stride(-1) == 1 and native.supports(heads, cosines, sines):
        out = torch.empty_like(heads, memory_format=torch.contiguous_format)
        native.ops.rotate(heads, cosines, sines, is_backward, out)
        return out
    turned, rest = heads.tensor_split((cosines.shape[-1],), dim=-1)
    swapped = _swapped(turned * sines) if is_backward else _swapped(turned) * sines
    return torch.cat([turned * cosines + swapped, rest], dim=-1)


def _swapped(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([second, first], dim=-1)
