"""Rotary position embeddings (2104.09864 §3.4.2): frequencies and their scalings, for layers with and without a window.

Scalings: linear (`--rotary-seq-len-interpolation-factor`), Llama 3's (`--use-rope-scaling`), YaRN (2309.00071 §3.4,
`--position-embedding-type yarn`), LongRoPE's (2402.13753, `--rotary-divisors` and `--rotary-attention-factor`). With
`--window-rotary-base` layers with a window have that base and no scaling.
Frequencies of both kinds of layers are then next to each other, because Megatron hands one tensor to all layers.
"""

import math

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.attention.segments import FULL, WINDOW
from megarl.mcore.config.model_flags import divisors_of


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
