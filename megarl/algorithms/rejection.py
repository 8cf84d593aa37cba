"""Rejection: tokens or responses for which π_old is too far from the rollout policy μ leave the loss.

Unlike a weight of 0, a rejected token leaves numerator and denominator, so the scale of the loss is that of the others.
With w = π_old/μ of a token, a bound is on one of four quantities

- k1: log w, held between the logarithms of a lowest and a highest ratio;
- k2: ½·(log w)²; k3: w − 1 − log w, the estimates of KL(μ‖π_old) that are never negative;
- abs: |log w|,

of each token, or on its sum, mean or maximum over a response's tokens, which is then rejected as a whole.
"""

import math
from typing import NamedTuple

from megarl.algorithms.packed import (
    broadcast_to_tokens,
    require_same_shape,
    response_counts,
    sums_by_sequence,
    token_sequences,
)
from megarl.algorithms.rollout_correction import LOG_WEIGHT_LIMIT
from megarl.deferred import Tensor, no_grad, torch

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
