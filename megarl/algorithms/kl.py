"""KL to the reference policy: per-token estimators, and the controllers of its coefficient β."""

import math

import torch
from torch import Tensor

from megarl.algorithms.packed import require_same_shape

KL_KINDS = ("k1", "k2", "k3", "k1+", "k3+")


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    kind: str,
    log_ratio_limit: float | None = None,
    value_limit: float | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) from one sampled token each. With d = logprobs − reference_logprobs:

    k1 = d (unbiased, may be negative), k2 = d²/2 (biased, never negative), k3 = exp(−d) − 1 + d (unbiased, never
    negative). J. Schulman, Approximating KL Divergence, 2020 (joschu.net/blog/kl-approx.html).

    As a loss, k1 and k3 have the right value and the wrong expected gradient (that of k1 is 0), k2 the right gradient
    and the wrong value. k1+ and k3+ go straight through: the value of k1 and k3, the gradient of k2, which is d.

    Args:
        logprobs, reference_logprobs: [T] log-probabilities of the same sampled tokens.
        kind: one of `KL_KINDS`.
        log_ratio_limit: clamp d to ± this first; None leaves it. verl uses 20 for k3.
        value_limit: clamp the estimate to ± this; None leaves it. verl uses 10 for k3. Both limits hold the value
            alone in k1+ and k3+, not the gradient.

    Returns:
        [T]. Exactly 0 where both log-probabilities are the same number.

    Raises:
        ValueError: shapes differ, or the kind is unknown.
    """
    require_same_shape(logprobs=logprobs, reference_logprobs=reference_logprobs)
    if kind not in KL_KINDS:
        raise ValueError(f"KL estimator {kind!r} is unknown, allowed: {', '.join(KL_KINDS)}")
    if kind.endswith("+"):
        gradient = 0.5 * (logprobs - reference_logprobs).square()
        value = kl_estimate(logprobs, reference_logprobs, kind[:-1], log_ratio_limit, value_limit)
        return value.detach() + (gradient - gradient.detach())  # in brackets: exactly 0, so the value keeps its bits
    log_ratio = logprobs - reference_logprobs
    if log_ratio_limit is not None:
        log_ratio = log_ratio.clamp(-log_ratio_limit, log_ratio_limit)
    if kind == "k1":
        estimate = log_ratio
    elif kind == "k2":
        estimate = 0.5 * log_ratio.square()
    else:
        estimate = torch.expm1(-log_ratio) + log_ratio  # expm1 keeps the digits of a small d
    return estimate if value_limit is None else estimate.clamp(-value_limit, value_limit)


class FixedKLController:
    """β that stays what it is. It has no state: a resumed run takes β from its own settings."""

    kind = "fixed"

    def __init__(self, coefficient: float):
        """`coefficient` is β ≥ 0. Raises ValueError otherwise."""
        self.coefficient = _checked(coefficient, "coefficient", zero_allowed=True)

    def update(self, measured_kl: float, samples: int) -> None:
        """Leave β as it is, whatever was measured."""

    def state_dict(self) -> dict:
        """What a checkpoint keeps: the kind alone."""
        return {"kind": self.kind}

    def load_state_dict(self, state: dict) -> None:
        """Raises ValueError when another kind of controller saved `state`."""
        _require_kind(state, self.kind)


class AdaptiveKLController:
    """β that steers the measured KL to a target: β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon).

    Fine-Tuning Language Models from Human Preferences (arXiv 1909.08593) §2.2: a proportional controller in log space.
    """

    kind = "adaptive"
    error_limit = 0.2

    def __init__(self, coefficient: float, target: float, horizon: float):
        """`coefficient`: first β > 0 (it changes by factors, 0 would stay 0). `target`: KL in nats a sequence or a
        token, as the caller measures it, > 0. `horizon`: samples over which an error of 20 % moves β by 20 %, > 0.

        Raises ValueError for a number that is not finite and positive.
        """
        self.coefficient = _checked(coefficient, "coefficient")
        self.target = _checked(target, "target")
        self.horizon = _checked(horizon, "horizon")

    def update(self, measured_kl: float, samples: int) -> None:
        """Move β once a step. `measured_kl` is the mean over the step, in the unit of the target; `samples` is the
        number n of sequences in it.

        Raises:
            ValueError: the KL is not finite, or n is negative or so large that β could reach 0.
        """
        if not math.isfinite(measured_kl):
            raise ValueError(f"measured_kl must be finite, got {measured_kl}")
        largest_step = self.error_limit * samples / self.horizon
        if not 0 <= largest_step < 1:
            raise ValueError(
                f"samples must be in [0, {self.horizon / self.error_limit:g}) with horizon {self.horizon:g}, "
                f"got {samples}: a longer horizon is needed"
            )
        error = measured_kl / self.target - 1
        error = min(max(error, -self.error_limit), self.error_limit)
        self.coefficient *= 1 + error * samples / self.horizon

    def state_dict(self) -> dict:
        """What a checkpoint keeps: the kind and the current β. Target and horizon are settings, not state."""
        return {"kind": self.kind, "coefficient": self.coefficient}

    def load_state_dict(self, state: dict) -> None:
        """Continue from a saved β. Raises ValueError when another kind of controller saved `state`, or β ≤ 0."""
        _require_kind(state, self.kind)
        self.coefficient = _checked(state["coefficient"], "coefficient")


def _checked(number: float, name: str, zero_allowed: bool = False) -> float:
    in_range = number >= 0 if zero_allowed else number > 0
    if not (math.isfinite(number) and in_range):
        raise ValueError(f"KL {name} must be finite and {'>= 0' if zero_allowed else '> 0'}, got {number}")
    return float(number)


def _require_kind(state: dict, kind: str) -> None:
    if state["kind"] != kind:
        raise ValueError(f"KL controller of the checkpoint is {state['kind']!r}, this run has {kind!r}")
