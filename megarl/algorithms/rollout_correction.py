"""Rollout correction: importance weights for training on samples of the rollout policy μ as if they were from π_old.

The rollout engine's log-probs and the recomputed ones differ (other kernels, other precision, older weights), so the
loss of each token is multiplied by w = π_old/μ, bounded in one of three ways:

- tis, truncated: min(w, cap). Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
  Training"; Espeholt et al. (arXiv 1802.01561, eq. 1).
- mis, masked: w where w ≤ cap, else 0. Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from
  the Training-Inference Mismatch".
- icepop: w where floor ≤ w ≤ cap, else 0. Ling Team 2025 (arXiv 2510.18855), which has 0.5 and 5.

Level "token": w_t of each token. "sequence": Π w_t over the response tokens. "geometric": its n-th root, exp(mean log
w_t). An unmasked token keeps its weight w. A masked token still counts in the denominators of the aggregation, as a
zero in a mean over the samples of μ, so the scale of the loss does not depend on how many tokens are masked. So do the
tokens that off-policy sequence masking drops: bad responses that the policy has moved away from (`off_policy_kept`).

`staleness` [T] is the policy updates between μ and π_old since a token was generated.
"""

import dataclasses
import math
from typing import NamedTuple

from megarl.algorithms.aggregation import masked_sum
from megarl.algorithms.kl import kl_estimate
from megarl.algorithms.packed import (
    broadcast_to_tokens,
    require_same_shape,
    response_counts,
    sums_by_sequence,
    token_sequences,
)
from megarl.algorithms.policy_loss import PolicyTokens, on_tokens, response_mean
from megarl.deferred import Tensor, no_grad, torch

CORRECTIONS = ("none", "tis", "mis", "icepop")
LEVELS = ("token", "sequence", "geometric")
NO_GAP = -1.0  # stands for the largest gap of no tokens
LOG_WEIGHT_LIMIT = 20.0  # bound of |log w|: a weight of 4.9e8, whose square is far from overflow


@dataclasses.dataclass(frozen=True)
class CorrectionOptions:
    """The kind of correction, its level, and the bounds of w."""

    kind: str = "none"  # of CORRECTIONS
    level: str = "token"  # of LEVELS
    cap: float = 2.0  # > 0
    floor: float | None = None  # in (0, cap], only for icepop


@no_grad
def correction_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor, options: CorrectionOptions
) -> Tensor:
    """The weight of each token's loss: [T] in the dtype of `old_logprobs`, no gradient, 1 outside the mask.

    Exactly 1 everywhere for kind "none", and where log π_old, which training computes, equals the engine's log μ.
    """
    weights = _level_weights(old_logprobs, rollout_logprobs, mask, cu_seqlens, options.level)
    applied = _applied(weights, options)
    if options.level != "token":
        applied = broadcast_to_tokens(applied, mask, cu_seqlens)
    return torch.where(mask, applied, 1.0).to(old_logprobs.dtype)


@no_grad
def off_policy_kept(tokens: PolicyTokens, threshold: float) -> Tensor:
    """[T] bool: False at response tokens with A < 0 of a response whose mean of log(μ/π_θ) is above the threshold.

    DeepSeek-V3.2 (arXiv 2512.02556, eq. 9), whose π_old is what the inference engine reports, here μ. A dropped token
    still counts in the denominators of the loss.
    """
    distance = response_mean(tokens.behaviour_logprobs - tokens.logprobs, tokens)
    is_far = on_tokens((distance > threshold).double(), tokens) > 0
    return ~(is_far & (tokens.advantages < 0))


@no_grad
def correction_sums(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor, options: CorrectionOptions
) -> tuple[Tensor, Tensor]:
    """Of a micro-batch of whole sequences for `correction_report`: sums float64 [9], to be added over micro-batches,
    and maxima float64 [1], to be maximized over them. Arguments as for `correction_weights`."""
    weights = _level_weights(old_logprobs, rollout_logprobs, mask, cu_seqlens, options.level)
    counted = mask if options.level == "token" else response_counts(mask, cu_seqlens) > 0
    weights = weights[counted]
    applied = _applied(weights, options)
    old, rollout = old_logprobs.double(), rollout_logprobs.double()
    sums = [
        counted.sum(),
        weights.sum(),
        weights.square().sum(),
        applied.sum(),
        ((weights > options.cap) & (options.kind == "tis")).sum(),
        (applied == 0).sum(),
        mask.sum(),
        masked_sum(kl_estimate(rollout, old, "k1"), mask),
        masked_sum(kl_estimate(rollout, old, "k3", log_ratio_limit=LOG_WEIGHT_LIMIT), mask),
    ]
    largest = torch.cat([weights, weights.new_zeros(1)]).amax(0, keepdim=True)  # weights are > 0, so 0 means none
    return torch.stack([each.double() for each in sums]), largest


def correction_report(sums: Tensor, maxima: Tensor) -> dict[str, float]:
    """Diagnostics of the whole batch from `correction_sums`, added (maximized) over micro-batches and ranks.

    Over unbounded weights, one per token, or per response on the other levels: "correction/weight_mean" (its
    expectation is 1), "correction/weight_max" and "correction/effective_sample_size" (Σw)²/(n·Σw²), in (0, 1] as a
    fraction of the samples. Over bounded weights: "correction/applied_mean", and the fractions
    "correction/truncated_fraction" (at the cap) and "correction/masked_fraction" (0). Over tokens: KL(μ || π_old) as
    "correction/kl" (k1) and "correction/kl_k3". All are 0 without response tokens.
    """
    count, total, squares, applied, truncated, masked, tokens, k1, k3 = sums.double().tolist()
    count, tokens = max(count, 1.0), max(tokens, 1.0)
    return {
        "correction/weight_mean": total / count,
        "correction/weight_max": float(maxima),
        "correction/effective_sample_size": total**2 / (count * squares) if squares else 0.0,
        "correction/applied_mean": applied / count,
        "correction/truncated_fraction": truncated / count,
        "correction/masked_fraction": masked / count,
        "correction/kl": k1 / tokens,
        "correction/kl_k3": k3 / tokens,
    }


def _level_weights(old: Tensor, rollout: Tensor, mask: Tensor, cu_seqlens: Tensor, level: str) -> Tensor:
    """float64 w: [T] on level "token" (1 outside the mask), else [N] (1 for an empty response)."""
    require_same_shape(old_logprobs=old, rollout_logprobs=rollout, response_mask=mask)
    log_weights = torch.where(mask, old.double() - rollout.double(), 0.0)
    if level != "token":
        log_weights = sums_by_sequence(log_weights, mask, cu_seqlens)
    if level == "geometric":
        log_weights = log_weights / response_counts(mask, cu_seqlens).clamp(min=1)
    return log_weights.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()


def _applied(weights: Tensor, options: CorrectionOptions) -> Tensor:
    """The bounded weights."""
    if options.kind == "none":
        return torch.ones_like(weights)
    if options.kind == "tis":
        return weights.clamp(max=options.cap)
    kept = weights <= options.cap
    if options.floor is not None:
        kept &= weights >= options.floor
    return torch.where(kept, weights, 0.0)


@no_grad
def proximal_logprobs(rollout_logprobs: Tensor, logprobs: Tensor, staleness: Tensor, progress: float) -> Tensor:
    """[T] log π_prox = log μ + a·(log π_θ − log μ): stands for π_old of tokens that an older policy generated.

    A policy that moves steadily from μ to π_θ was π_old after the share a = s / (s + progress) of its way. A token of
    π_old itself (s = 0) has log μ; before the first update a stale token has log π_θ, which is then log π_old.
    `logprobs`: [T] log π_θ; `progress`: share of the step's updates that were made, in [0, 1].
    """
    age = staleness.to(logprobs.dtype)
    share = torch.where(staleness > 0, age / (age + progress).clamp(min=1e-30), 0.0)
    return torch.lerp(rollout_logprobs, logprobs, share)  # exact at 0 and 1


@no_grad
def staleness_maxima(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, staleness: Tensor) -> Tensor:
    """float64 [2], to be maximized over replicas: largest |log π_old − log μ| of the tokens that are not stale, and
    largest staleness ([T] int32)."""
    fresh = mask & (staleness == 0)
    gaps = (old_logprobs - rollout_logprobs)[fresh].abs().double()
    stale = staleness[mask].double()
    return torch.stack([torch.cat([x, x.new_tensor([least])]).amax() for x, least in ((gaps, NO_GAP), (stale, 0.0))])


@no_grad
def staleness_sums(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, staleness: Tensor, largest: int
) -> Tensor:
    """float64 [2 · (largest + 1)], to be added over replicas: tokens of each staleness, then their sums of k3.

    `largest`: staleness of all replicas; other arguments as of `staleness_maxima`.
    """
    k3 = kl_estimate(rollout_logprobs.double(), old_logprobs.double(), "k3", log_ratio_limit=LOG_WEIGHT_LIMIT)[mask]
    index, zeros = staleness[mask].long(), k3.new_zeros(largest + 1)
    return torch.cat([zeros.index_add(0, index, torch.ones_like(k3)), zeros.index_add(0, index, k3)])


def staleness_report(maxima: Tensor, sums: Tensor) -> dict[str, float]:
    """Diagnostics of the whole batch from `staleness_maxima` and `staleness_sums`.

    "rollout/logprob_gap_max_fresh", and KL(μ || π_old) of the tokens of each staleness k as "correction/kl_k3_age_<k>";
    none of tokens that do not occur.
    """
    fresh, (counts, k3) = float(maxima[0]), sums.view(2, -1).tolist()
    found = {} if fresh == NO_GAP else {"rollout/logprob_gap_max_fresh": fresh}
    ages = [age for age, count in enumerate(counts) if count]
    return found | {f"correction/kl_k3_age_{age}": k3[age] / counts[age] for age in ages}


# -- rejection -----------------------------------------------------------------------------------------------------
# Tokens or responses for which π_old is too far from the rollout policy μ leave the loss. Unlike a weight of 0, a
# rejected token leaves numerator and denominator, so the scale of the loss is that of the others. With w = π_old/μ of a
# token, a bound is on one of four quantities
#
# - k1: log w, held between the logarithms of a lowest and a highest ratio;
# - k2: ½·(log w)²; k3: w − 1 − log w, the estimates of KL(μ‖π_old) that are never negative;
# - abs: |log w|,
#
# of each token, or on its sum, mean or maximum over a response's tokens, which is then rejected as a whole.

TOKEN, SUM, MEAN, MAX = SCOPES = ("token", "sum", "mean", "max")
QUANTITIES = ("k1", "k2", "k3", "abs")


class Bound(NamedTuple):
    """One condition that what is kept meets."""

    scope: str  # of SCOPES
    quantity: str  # of QUANTITIES
    low: float  # of log w for k1; unused otherwise
    high: float  # of log w for k1, else of the quantity

    @property
    def name(self) -> str:
        """As in `--rollout-rejection`."""
        return f"{self.scope}-{self.quantity}"


def parse_bounds(text: str) -> tuple[Bound, ...]:
    """`"mean-abs=0.1 token-k1=0.5:2"` -> its bounds. ValueError for anything else, or a name twice."""
    bounds = [_parse(word) for word in text.split()]
    names = [bound.name for bound in bounds]
    if not bounds or len(set(names)) < len(names):
        raise ValueError(f"{text!r}: needs one bound or more, each name once")
    return tuple(bounds)


def _parse(word: str) -> Bound:
    name, equals, numbers = word.partition("=")
    scope, _, quantity = name.partition("-")
    limits = [float(number) for number in numbers.split(":")]
    if not equals or scope not in SCOPES or quantity not in QUANTITIES or (scope, quantity) == (MAX, "k1"):
        raise ValueError(f"{word!r} has no known name")
    if len(limits) != 1 + (quantity == "k1") or not all(0 < limit < math.inf for limit in limits):
        raise ValueError(f"{word!r} needs LOW:HIGH for k1, else one number above 0")
    if quantity != "k1":
        return Bound(scope, quantity, -math.inf, limits[0])
    if limits[0] > limits[1]:
        raise ValueError(f"{word!r}: the lowest ratio is above the highest")
    return Bound(scope, quantity, math.log(limits[0]), math.log(limits[1]))


@no_grad
def kept_tokens(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor, bound: Bound
) -> Tensor:
    """[T] bool: the response tokens that meet a bound; False outside the mask.

    `old_logprobs`, `rollout_logprobs`: [T] log π_old and log μ, read at response tokens only.
    """
    require_same_shape(old_logprobs=old_logprobs, rollout_logprobs=rollout_logprobs, mask=mask)
    log_ratio = torch.where(mask, old_logprobs.double() - rollout_logprobs.double(), 0.0)
    values = _of_tokens(log_ratio, bound.quantity)
    if bound.scope != TOKEN:
        values = _of_responses(values, bound.scope, mask, cu_seqlens)
    is_kept = (values >= bound.low) & (values <= bound.high)
    return is_kept & mask if bound.scope == TOKEN else broadcast_to_tokens(is_kept, mask, cu_seqlens)


def _of_tokens(log_ratio: Tensor, quantity: str) -> Tensor:
    log_ratio = log_ratio.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
    if quantity == "k1":
        return log_ratio
    if quantity == "abs":
        return log_ratio.abs()
    return 0.5 * log_ratio.square() if quantity == "k2" else torch.expm1(log_ratio) - log_ratio


def _of_responses(values: Tensor, scope: str, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[N] sum, mean or maximum over the response tokens of each sequence; 0 of an empty response."""
    if scope == MAX:  # of values that are 0 or more
        nothing = values.new_zeros(cu_seqlens.numel() - 1)
        return nothing.scatter_reduce(0, token_sequences(mask, cu_seqlens), values.masked_fill(~mask, 0.0), "amax")
    sums = sums_by_sequence(values, mask, cu_seqlens)
    return sums if scope == SUM else sums / response_counts(mask, cu_seqlens).clamp(min=1)


@no_grad
def rejection_sums(kept: list[Tensor], mask: Tensor, correct: Tensor, cu_seqlens: Tensor) -> Tensor:
    """float64 [3 + B], to be added over replicas, for `rejection_report`: of `kept_tokens` of each of B bounds, and of
    which responses are correct, [N] bool."""
    together = torch.stack(kept).all(0)
    lost = response_counts(together, cu_seqlens) == 0
    lost &= response_counts(mask, cu_seqlens) > 0
    sums = [mask.sum(), (lost & correct).sum(), lost.sum(), *((mask & ~each).sum() for each in kept)]
    return torch.cat([torch.stack(sums).double(), (mask & ~together).sum().double().view(1)])


def rejection_report(sums: Tensor, bounds: tuple[Bound, ...]) -> dict[str, float]:
    """Diagnostics of the whole batch from `rejection_sums`: "rejection/fraction" of the tokens, by all bounds together
    and by each ("rejection/mean_abs"), and the "rejection/responses" that lost all tokens, with the correct ones."""
    tokens, correct, lost, *by_bound, together = sums.tolist()
    tokens = max(tokens, 1.0)
    return {
        "rejection/fraction": together / tokens,
        "rejection/responses": lost,
        "rejection/correct_responses": correct,
        **{
            f"rejection/{bound.scope}_{bound.quantity}": count / tokens
            for bound, count in zip(bounds, by_bound, strict=True)
        },
    }
