"""One uniform number per (seed, step, prompt, sample, position), so that sampling does not depend on the layout.

SplitMix64 (Steele, Lea, Flood 2014) as a counter-based generator: the n-th output is a hash of key + n·γ, so any
number can be computed alone, in any order, on any rank. Signed int64 tensors hold the unsigned arithmetic mod 2^64.
"""

from megarl.deferred import Tensor, torch

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64(state: Tensor) -> Tensor:
    """SplitMix64's output for a state that already includes γ: int64 bit patterns of unsigned numbers."""
    z = (state ^ _shift_right(state, 30)) * _signed(_FIRST)
    z = (z ^ _shift_right(z, 27)) * _signed(_SECOND)
    return z ^ _shift_right(z, 31)


def stream_keys(seed: int, step: int, prompts: Tensor, samples: Tensor) -> Tensor:
    """[N] int64 keys of the streams of N responses; prompts and samples are [N] int64."""
    key = splitmix64(torch.full_like(prompts, _signed(seed + GOLDEN_GAMMA)))
    for counter in (torch.full_like(prompts, step), prompts, samples):
        key = splitmix64((key ^ counter) + _signed(GOLDEN_GAMMA))
    return key


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """[N] float64 in (0, 1): the number of each stream at each position."""
    bits = splitmix64(keys + (positions + 1) * _signed(GOLDEN_GAMMA))
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52
