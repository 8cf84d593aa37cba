"""Samples tokens: the settings, one random number for each token, and the token that it chooses from the logits.

There is one uniform number per (seed, step, prompt, sample, position), so that sampling does not depend on the layout.
SplitMix64 (Steele, Lea, Flood 2014) is used as a counter-based generator: the n-th output is a hash of key + n·γ, so
any number can be computed alone, in any order, on any rank. Signed int64 tensors hold unsigned arithmetic mod 2^64.

Temperature, top-k, top-p, min-p and the inverse CDF have two implementations, which draw the same tokens up to
rounding: one with floating-point sums, for CPUs, and one with sums of integers, which have one value in any order: a
GPU then needs neither a host nor a fixed order.
"""

import math
from dataclasses import dataclass

from megarl.deferred import Tensor, torch

UNIT = 2.0**43  # a weight of 1 as an integer: sums over fewer than 2^20 tokens fit into 63 bits
CHUNK = 2**24  # most elements of weights that become integers at a time: 128 MiB for each of a few buffers
BLOCK = 256  # vocabulary tokens per block of the two-level search
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MULTIPLIERS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are sampled. The rollout's log-probs are those of the temperature-scaled policy over the whole
    vocabulary, as training recomputes them; top-k, top-p and min-p restrict the sampling, not the log-probs."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    min_p: float = 0.0  # least probability of a token, as a share of the most likely one's (2407.01082)

    @property
    def is_restricted(self) -> bool:
        """Whether some tokens of the vocabulary may be excluded."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def signed(value: int) -> int:
    """The signed number with the lowest 64 bits of `value`."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64(state: Tensor) -> Tensor:
    """SplitMix64's output for a state that already includes γ: int64 bit patterns of unsigned numbers."""
    z = (state ^ _shift_right(state, 30)) * signed(MULTIPLIERS[0])
    z = (z ^ _shift_right(z, 27)) * signed(MULTIPLIERS[1])
    return z ^ _shift_right(z, 31)


def stream_keys(seed: int, step: int, prompts: Tensor, samples: Tensor) -> Tensor:
    """[N] int64 keys of the streams of N responses; prompts and samples are [N] int64."""
    key = splitmix64(torch.full_like(prompts, signed(seed + GOLDEN_GAMMA)))
    for counter in (torch.full_like(prompts, step), prompts, samples):
        key = splitmix64((key ^ counter) + signed(GOLDEN_GAMMA))
    return key


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """[N] float64 in (0, 1): the number of each stream at each position."""
    bits = splitmix64(keys + (positions + 1) * signed(GOLDEN_GAMMA))
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def restrict(weights: Tensor, settings: SamplingSettings) -> Tensor:
    """Zero the weights [N, V] (probabilities, or any multiple of them) outside of top-k, top-p and min-p."""
    if 0 < settings.top_k < weights.shape[-1]:
        # A stable sort keeps exactly k tokens when probabilities tie, as those of 16-bit logits often do.
        order = weights.sort(dim=-1, descending=True, stable=True).indices
        weights = weights.scatter(-1, order[:, settings.top_k :], 0.0)
    if settings.top_p < 1.0:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        outside = before >= settings.top_p * ordered.sum(-1, keepdim=True)  # keep the token that crosses top_p
        weights = weights.masked_fill(outside.scatter(-1, order, outside), 0.0)
    return weights.masked_fill(_is_unlikely(weights, settings), 0.0) if settings.min_p > 0 else weights


def _is_unlikely(weights: Tensor, settings: SamplingSettings) -> Tensor:
    """[N, V] whether min-p excludes a token; top-k and top-p, whose most likely token is the same, exclude others."""
    return weights < settings.min_p * weights.amax(-1, keepdim=True)


def _first_above(masses: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """First index [N, 1] whose cumulative mass exceeds target [N, 1], and cumulative masses, of masses [N, M]."""
    cumulative = masses.double().cumsum(-1)
    # The target is below the total, but rounding may reach it: then return the last index with mass.
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.searchsorted(cumulative, target, right=True).minimum(last), cumulative


def inverse_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """[N] tokens: the first whose cumulative share of the weights [N, V] exceeds its uniform number [N] float64.

    Finds the block of the vocabulary, then the token in it, so that few values are summed in double precision.
    """
    width = math.gcd(weights.shape[-1], BLOCK)
    blocks = weights.unflatten(-1, (-1, width if width >= BLOCK // 8 else weights.shape[-1]))
    masses = blocks.sum(-1)
    target = numbers.unsqueeze(-1) * masses.double().sum(-1, keepdim=True)
    if blocks.shape[1] == 1:
        return _first_above(weights, target)[0].squeeze(-1)
    block, cumulative = _first_above(masses, target)
    before = cumulative.gather(-1, block) - masses.gather(-1, block)
    within = blocks.take_along_dim(block.unsqueeze(-1), 1).squeeze(1)
    token, _ = _first_above(within, target - before)
    return (block * within.shape[-1] + token).squeeze(-1)


def sample_tokens(logits: Tensor, weights: Tensor, numbers: Tensor, settings: SamplingSettings) -> Tensor:
    """[N] tokens from logits [N, V] and `weights` [N, ≥ V]: the exponentials of the temperature-scaled logits up to a
    factor per row, 0 in columns after the vocabulary."""
    return logits.argmax(-1) if settings.greedy else inverse_cdf(restrict(weights, settings), numbers)


def sample_tokens_by_integers(logits: Tensor, weights: Tensor, numbers: Tensor, settings: SamplingSettings) -> Tensor:
    """Same as `sample_tokens` with sums of integers, for fewer than 2^20 tokens and fp32 weights of at most 1.

    Nothing that it calls is refused in deterministic runs on CUDA. All tensors are on one device; nothing waits for it.
    """
    if settings.greedy:
        return logits.argmax(-1)
    rows = max(CHUNK // weights.shape[-1], 1)
    chunks = zip(weights.split(rows), numbers.split(rows), strict=True)
    return torch.cat([_first_above_integers(restricted_integers(w, settings), n) for w, n in chunks])


def _integers(weights: Tensor) -> Tensor:
    return (weights * UNIT).to(torch.int64)


def restricted_integers(weights: Tensor, settings: SamplingSettings) -> Tensor:
    """Weights [N, V] as integers, 0 outside of top-k, top-p and min-p.

    A key has a weight's bits, which grow with it, above those of its index: all differ, in a stable sort's order.
    """
    counts, (rows, size) = _integers(weights), weights.shape
    if settings.min_p > 0:
        counts.masked_fill_(_is_unlikely(weights, settings), 0)
    if not settings.top_k and settings.top_p == 1.0:
        return counts
    index = size - counts.new_ones(size).cumsum(0)  # descending
    keys = (weights.contiguous().view(torch.int32).to(torch.int64) << 32) + index
    has_top_k = 0 < settings.top_k < size
    first = keys.topk(settings.top_k).values if has_top_k else keys.sort(-1, descending=True).values
    last = first.new_full((rows, 1), first.shape[-1] - 1)
    if settings.top_p < 1.0:
        ordered = _integers((first >> 32).to(torch.int32).view(torch.float32))
        before = ordered.cumsum(-1) - ordered
        is_inside = before < settings.top_p * ordered.sum(-1, keepdim=True).double()
        last = is_inside.sum(-1, keepdim=True).sub_(1).clamp_(min=0)  # of a prefix, as `before` ascends
    return counts.masked_fill_(keys < first.gather(-1, last), 0)


def _first_above_integers(counts: Tensor, numbers: Tensor) -> Tensor:
    """[N] tokens: the first whose cumulative share of the counts [N, V] exceeds its uniform number [N] float64."""
    cumulative = counts.cumsum(-1)
    total = cumulative[:, -1:]
    # The target is below the total, but rounding may reach it.
    target = torch.minimum((numbers.unsqueeze(-1) * total).to(torch.int64), total - 1)
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1)
