"""Losses with one number for a whole response: GSPO, its token form, LUSPO, GMPO, TOPR, VESPO and REAL.

The number is a ratio, an importance weight, or the advantage that REAL gives a response within its group.
"""

import dataclasses
from collections.abc import Callable

from megarl.algorithms.packed import broadcast_to_tokens, response_counts, sums_by_sequence
from megarl.algorithms.policy_loss import (
    LOG_RATIO_LIMIT,
    ClipRange,
    PolicyTerms,
    PolicyTokens,
    clipped_surrogate,
    on_tokens,
    positive,
    positive_finite,
    response_log_ratio,
    response_mean,
)
from megarl.algorithms.policy_losses.single_tokens import reinforce
from megarl.deferred import Tensor, torch

_GSPO_LIMIT = 10.0  # upper bound of log s (a ratio of 22,026, as in verl), without which exp overflows
_REAL_LIMIT = 500.0  # of s/τ: sums of any number of responses stay finite in float64


def gspo(tokens: PolicyTokens, clip: ClipRange) -> PolicyTerms:
    """max(−A·s, −A·clip(s, 1−low, 1+high)) with the sequence ratio s = exp(mean over the response of log r).

    GSPO (arXiv 2507.18071, §4.1, eq. 5 and 7). Each response has one advantage A: the mean over its tokens where they
    differ. Its loss is repeated on each token, so `seq-mean-token-mean` gives the paper's objective.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs.detach()
    ratio = response_mean(log_ratio, tokens).clamp(max=_GSPO_LIMIT).exp()
    loss, clipped = clipped_surrogate(ratio, response_mean(tokens.advantages.detach(), tokens), clip)
    clipped = broadcast_to_tokens(clipped, tokens.response_mask, tokens.cu_seqlens)
    return PolicyTerms(on_tokens(loss, tokens), clipped, -log_ratio.detach())


def gspo_token(tokens: PolicyTokens, clip: ClipRange) -> PolicyTerms:
    """GSPO's token form: like `gspo`, but with the ratio s_t = sg[s]·π_θ/sg[π_θ] and the advantage A_t of each token.

    arXiv 2507.18071, §4.3, eq. 13 and 14. Where all A_t of a response are equal, loss and gradient are those of `gspo`
    under any aggregation that weights the tokens of a response equally.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs.detach()
    sequence_log_ratio = on_tokens(response_mean(log_ratio.detach(), tokens), tokens)
    # logprobs − sg[logprobs] is exactly 0: it changes no value and carries the gradient.
    ratio = (sequence_log_ratio + (tokens.logprobs - tokens.logprobs.detach())).clamp(max=_GSPO_LIMIT).exp()
    loss, clipped = clipped_surrogate(ratio, tokens.advantages.detach(), clip)
    return PolicyTerms(loss, clipped, -log_ratio.detach())


def luspo(tokens: PolicyTokens, clip: ClipRange) -> PolicyTerms:
    """|o| times the loss of `gspo`, which prefers short responses: with `seq-mean-token-mean` one weighs its length.

    LUSPO (arXiv 2602.05261).
    """
    terms = gspo(tokens, clip)
    lengths = response_counts(tokens.response_mask, tokens.cu_seqlens)
    return terms._replace(loss=on_tokens(lengths, tokens) * terms.loss)


def gmpo(tokens: PolicyTokens, clip: ClipRange) -> PolicyTerms:
    """−A·exp(mean over the response of clipped log r): the geometric mean of the clipped ratios.

    GMPO (arXiv 2507.20673). Each token is clipped in log space, on the side of its advantage's sign: log r ≤ high
    where A_t > 0, log r ≥ −low where A_t < 0 (0.4 on both sides in the paper); a token with A_t = 0 has ratio 1. A is
    the mean of the A_t: the paper has one advantage per response. The loss is repeated on each token of the response,
    so `seq-mean-token-mean` gives the paper's objective.
    """
    log_ratio, advantages = tokens.logprobs - tokens.old_logprobs.detach(), tokens.advantages.detach()
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=clip.high), log_ratio.clamp(min=-clip.low))
    bounded = torch.where(advantages == 0, torch.zeros_like(bounded), bounded)
    ratio = response_mean(bounded, tokens).clamp(max=LOG_RATIO_LIMIT).exp()
    loss = -response_mean(advantages, tokens) * ratio
    clipped = (advantages != 0) & (bounded != log_ratio)
    return PolicyTerms(on_tokens(loss, tokens), clipped, -log_ratio.detach())


@dataclasses.dataclass(frozen=True)
class ToprOptions:
    """The bound of the weight."""

    cap: float = positive(1.0, "largest importance weight of a response with an advantage below 0 (2503.14286)")


def topr(tokens: PolicyTokens, options: ToprOptions) -> PolicyTerms:
    """−A·log π_θ where A ≥ 0; −sg[min(W, cap)]·A·log π_θ where A < 0, W = Π π_θ/μ over the response.

    TOPR (arXiv 2503.14286): a response that became unlikely is not pushed down further, without any KL. The aggregation
    of the paper's objective is `seq-mean-token-sum`. `clipped`: the cap replaced W.
    """
    advantages = tokens.advantages.detach()
    weight = response_log_ratio((tokens.logprobs - tokens.behaviour_logprobs).detach(), tokens).exp()
    is_negative = advantages < 0
    weights = torch.where(is_negative, weight.clamp(max=options.cap), 1.0).to(tokens.logprobs.dtype)
    return PolicyTerms(-weights * advantages * tokens.logprobs, is_negative & (weight > options.cap), tokens.approx_kl)


@dataclasses.dataclass(frozen=True)
class VespoOptions:
    """The kernel W^k·e^{λ(1 − W)}; it is largest at W = k/λ. The defaults are those of the paper's code and of TRL."""

    k_positive: float = positive_finite(2.0, "exponent k of the kernel where the advantage is 0 or more (2602.10693)")
    lambda_positive: float = positive_finite(3.0, "decay λ of the kernel where the advantage is 0 or more (2602.10693)")
    k_negative: float = positive_finite(3.0, "exponent k of the kernel where the advantage is below 0 (2602.10693)")
    lambda_negative: float = positive_finite(2.0, "decay λ of the kernel where the advantage is below 0 (2602.10693)")


def vespo(tokens: PolicyTokens, options: VespoOptions) -> PolicyTerms:
    """−sg[φ(W)]·A·log π_θ, φ(W) = W^k·e^{λ(1 − W)}, W = Π π_θ/μ over the response; `clipped` is always False.

    A smooth kernel of the importance weight: VESPO (arXiv 2602.10693). k and λ are chosen by the sign of A; φ(1) = 1.
    """
    advantages = tokens.advantages.detach()
    log_weight = response_log_ratio((tokens.logprobs - tokens.behaviour_logprobs).detach(), tokens)

    def by_sign(rewarded: float, punished: float) -> Tensor:
        return torch.where(advantages >= 0, log_weight.new_full((), rewarded), log_weight.new_full((), punished))

    k = by_sign(options.k_positive, options.k_negative)
    decay = by_sign(options.lambda_positive, options.lambda_negative)
    kernel = (k * log_weight + decay * (1 - log_weight.exp())).exp().to(tokens.logprobs.dtype)
    loss = -kernel * advantages * tokens.logprobs
    return PolicyTerms(loss, torch.zeros_like(tokens.response_mask), tokens.approx_kl)


@dataclasses.dataclass(frozen=True)
class RealOptions:
    """How sharp the classification is."""

    tau: float = positive(0.5, "temperature τ of a response's mean log-ratio (2602.05630 and its code)")


def real(tokens: PolicyTokens, options: RealOptions) -> PolicyTerms:
    """−A·log π_θ with the advantages of `real_advantages`: under `seq-mean-token-mean` the gradient is REAL's."""
    return reinforce(tokens, None)


def real_advantages(
    tokens: PolicyTokens, options: RealOptions, groups: Tensor, group_count: int, total: Callable[[Tensor], Tensor]
) -> Tensor:
    """[T] A = ±(G/τ)·e^{∓s/τ} / (1 + Σ e^{∓s/τ}), + for good responses, − for bad ones, Σ over those of the same kind.

    The gradient of the mean over groups of log(1 + Σ₊ e^{−s/τ}) + log(1 + Σ₋ e^{s/τ}), s the mean of log π_θ/π_old
    over a response: REAL (arXiv 2602.05630) classifies the responses of a group by how far the policy has moved on
    them. Good and bad are the signs of the estimator's advantages, so of verdicts the labels are those of the paper; G
    is the number of the group's responses with tokens. As in the paper's code, a group without both kinds has no
    gradient, but counts in the mean.
    """
    mask, cu_seqlens = tokens.response_mask, tokens.cu_seqlens
    fields, counts = (tokens.logprobs - tokens.old_logprobs, tokens.advantages), response_counts(mask, cu_seqlens)
    means = [sums_by_sequence(x.double(), mask, cu_seqlens) / counts.clamp(min=1) for x in fields]
    scores, signs = means[0] / options.tau, means[1].sign()
    weights = (-signs * scores).clamp(-_REAL_LIMIT, _REAL_LIMIT).exp()
    kinds = torch.stack([signs > 0, signs < 0, counts > 0]).double()
    columns = torch.cat([kinds, kinds[:2] * weights])
    table = columns.new_zeros(len(columns), group_count).index_add_(1, groups, columns)
    good, bad, size, sum_of_good, sum_of_bad = total(table)[:, groups]
    sums = torch.where(signs > 0, sum_of_good, sum_of_bad)
    factors = torch.where((good > 0) & (bad > 0), size / options.tau * weights / (1 + sums), 0.0)
    return broadcast_to_tokens(signs * factors, mask, cu_seqlens).to(tokens.advantages.dtype)
