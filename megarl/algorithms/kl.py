"""KL to the reference policy: per-token estimators, and the controller of its coefficient β; and divergences between
the distributions of a student and a teacher over the whole vocabulary."""

import math
from typing import NamedTuple

from megarl.algorithms.packed import require_same_shape
from megarl.deferred import Tensor, torch

UNBIASED = "k3-unbiased"
KL_KINDS = ("k1", "k2", "k3", "k1+", "k3+", UNBIASED)
IN_LOSS = ("k1+", "k3+", UNBIASED)  # differ from k1 and k3 in the gradient only, which a reward does not have
# Clamp of log π_θ − log π_ref, in the loss and in the reward: exp(89) overflows float32, and one such token would give
# a whole group of responses no finite advantage.
REFERENCE_LOG_RATIO_LIMIT = 20.0


def kl_estimate(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    kind: str,
    log_ratio_limit: float | None = None,
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) from one sampled token each. With d = logprobs − reference_logprobs:

    k1 = d (unbiased, may be negative), k2 = d²/2 (biased, never negative), k3 = exp(−d) − 1 + d (unbiased, never
    negative). J. Schulman, Approximating KL Divergence, 2020 (joschu.net/blog/kl-approx.html).

    As a loss, k1 and k3 have the right value and the wrong expected gradient (that of k1 is 0), k2 the right gradient
    and the wrong value. k1+ and k3+ are straight-through: the value of k1 and k3, the gradient of k2, which is d.
    k3-unbiased is r·k3 with r = π_θ/π_old, whose gradient counts: tokens of π_old then give the KL of π_θ, and its
    gradient, without bias (DeepSeek-V3.2, arXiv 2512.02556, §3.1).

    Args:
        logprobs, reference_logprobs: [T] log-probabilities of the same sampled tokens.
        kind: one of `KL_KINDS`, else ValueError.
        log_ratio_limit: clamp d to ± this first; None: no limit. In k1+ and k3+ it applies to the value, not to the
            gradient.
        old_logprobs: [T] log π_old, only for k3-unbiased; None: the tokens are of the policy itself.

    Returns:
        [T]. Exactly 0 where both log-probabilities are equal.
    """
    require_same_shape(logprobs=logprobs, reference_logprobs=reference_logprobs)
    if kind not in KL_KINDS:
        raise ValueError(f"KL estimator {kind!r} is unknown, allowed: {', '.join(KL_KINDS)}")
    if kind.endswith("+"):
        gradient = 0.5 * (logprobs - reference_logprobs).square()
        value = kl_estimate(logprobs, reference_logprobs, kind[:-1], log_ratio_limit)
        return value.detach() + (gradient - gradient.detach())  # the bracket is exactly 0 and only carries the gradient
    if kind == UNBIASED:
        log_ratio = logprobs - (logprobs if old_logprobs is None else old_logprobs).detach()
        limit = REFERENCE_LOG_RATIO_LIMIT if log_ratio_limit is None else log_ratio_limit
        value = kl_estimate(logprobs, reference_logprobs, "k3", log_ratio_limit)
        return log_ratio.clamp(-limit, limit).exp() * value
    log_ratio = logprobs - reference_logprobs
    if log_ratio_limit is not None:
        log_ratio = log_ratio.clamp(-log_ratio_limit, log_ratio_limit)
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(-log_ratio) + log_ratio  # expm1 keeps the digits of a small d


class KLController:
    """The coefficient β of the KL: constant, or adapted so that the measured KL stays at a target.

    β ← β·(1 + clip(KL/target − 1, ±0.2)·n/horizon): a proportional controller in log space, Fine-Tuning Language Models
    from Human Preferences (arXiv 1909.08593) §2.2.
    """

    error_limit = 0.2

    def __init__(self, coefficient: float, target: float | None = None, horizon: float = 10000.0):
        """ValueError for a number that is not finite, or out of its range.

        Args:
            coefficient: β ≥ 0; an adaptive one starts above 0: it changes by factors.
            target: KL > 0 in nats per sequence or per token, as the caller measures it; None: β is constant.
            horizon: samples > 0 over which an error of 20 % changes β by 20 %.
        """
        self.kind = "fixed" if target is None else "adaptive"
        self.coefficient = _checked(coefficient, "coefficient", zero_allowed=target is None)
        self.target = target if target is None else _checked(target, "target")
        self.horizon = _checked(horizon, "horizon")

    def update(self, measured_kl: float, samples: int) -> None:
        """Adapt β, once per step. `measured_kl`: mean over the step, in the unit of the target; `samples`: its number n
        of sequences. ValueError if the KL is not finite, or n is negative or so large that β could reach 0."""
        if self.target is None:
            return
        if not math.isfinite(measured_kl):
            raise ValueError(f"measured_kl must be finite, got {measured_kl}")
        largest_step = self.error_limit * samples / self.horizon
        if not 0 <= largest_step < 1:
            raise ValueError(
                f"samples must be in [0, {self.horizon / self.error_limit:g}) with horizon {self.horizon:g}, "
                f"got {samples}: use a longer horizon"
            )
        error = measured_kl / self.target - 1
        error = min(max(error, -self.error_limit), self.error_limit)
        self.coefficient *= 1 + error * samples / self.horizon

    def state_dict(self) -> dict:
        """State for a checkpoint: the kind, and an adapted β. All else are settings."""
        return {"kind": self.kind} | ({} if self.target is None else {"coefficient": self.coefficient})

    def load_state_dict(self, state: dict) -> None:
        """Continue from a saved β. Raises ValueError when another kind of controller saved `state`, or β ≤ 0."""
        if state["kind"] != self.kind:
            raise ValueError(f"KL controller of the checkpoint is {state['kind']!r}, this run has {self.kind!r}")
        if self.target is not None:
            self.coefficient = _checked(state["coefficient"], "coefficient")


def _checked(number: float, name: str, zero_allowed: bool = False) -> float:
    in_range = number >= 0 if zero_allowed else number > 0
    if not (math.isfinite(number) and in_range):
        raise ValueError(f"KL {name} must be finite and {'>= 0' if zero_allowed else '> 0'}, got {number}")
    return float(number)


# -- divergences between distributions over the vocabulary, and their gradients ------------------------------------
# With P_T the teacher, P_S the student, and the mixture M = βP_T + (1−β)P_S: forward KL(P_T‖P_S), reverse
# KL(P_S‖P_T), and the generalized JSD = β·KL(P_T‖M) + (1−β)·KL(P_S‖M) (GKD, 2306.13649).
#
# All functions take log-probs [n, v] of a part of the vocabulary: its columns on this rank. The caller adds up the sums
# over the ranks. Where both distributions are equal, every term is exactly 0, and so is the gradient.

FORWARD, REVERSE, JSD = DIVERGENCES = ("forward", "reverse", "jsd")


class Divergence(NamedTuple):
    """One of `DIVERGENCES`, with β of the mixture."""

    name: str
    beta: float = 0.5  # of `JSD`, 0 < β < 1


def log_mixture_ratio(difference: Tensor, beta: float) -> Tensor:
    """log(M / the larger of P_S and P_T) from log P_T − log P_S, without overflow, exactly 0 at 0.

    Therefore log(M/P_S) = this + max(difference, 0), and log(M/P_T) = this + max(−difference, 0).
    """
    share = torch.where(difference > 0, 1 - beta, beta)
    return difference.abs().neg_().expm1_().mul_(share).log1p_()


def divergence_sums(student: Tensor, teacher: Tensor, divergence: Divergence) -> Tensor:
    """This part's summands of forward KL, reverse KL and, for `JSD`, of JSD and KL(P_S‖M): [2 or 4, n]."""
    difference = teacher - student
    p_teacher, p_student = teacher.exp(), student.exp()
    sums = [(p_teacher * difference).sum(-1), (p_student * difference).sum(-1).neg_()]
    if divergence.name == JSD:
        ratio = log_mixture_ratio(difference, divergence.beta)
        to_student = p_student.mul_(ratio + difference.clamp(min=0)).sum(-1).neg_()
        to_teacher = p_teacher.mul_(ratio.sub_(difference.clamp_(max=0))).sum(-1).neg_()
        sums += [divergence.beta * to_teacher + (1 - divergence.beta) * to_student, to_student]
    return torch.stack(sums)


def value_of(sums: Tensor, divergence: Divergence) -> Tensor:
    """[n] the divergence from its sums over the whole vocabulary."""
    return sums[DIVERGENCES.index(divergence.name)]


def center_of(sums: Tensor, divergence: Divergence) -> Tensor:
    """[n] what `logit_gradient` needs to know of the whole vocabulary."""
    return sums[3] if divergence.name == JSD else sums[1]


def logit_gradient(student: Tensor, teacher: Tensor, center: Tensor, divergence: Divergence) -> Tensor:
    """∂D/∂x [n, v] in the student's scaled logits x: P_S ⊙ (g − E_{P_S}[g]).

    g = −P_T/P_S for forward KL, log(P_S/P_T) for reverse KL, (1−β)·log(P_S/M) for JSD. Forward KL gives P_S − P_T.
    """
    if divergence.name == FORWARD:
        return student.exp() - teacher.exp()
    difference, scale = teacher - student, -1.0
    if divergence.name == JSD:
        ratio = log_mixture_ratio(difference, divergence.beta)
        difference, scale = ratio.add_(difference.clamp_(min=0)), divergence.beta - 1
    return difference.add_(center.unsqueeze(-1)).mul_(student.exp()).mul_(scale)
