"""VESPO: a smooth kernel of the whole response's importance weight."""

import dataclasses

from megarl.algorithms.policy_loss import PolicyLoss, PolicyTerms, PolicyTokens, positive_finite, response_log_ratio
from megarl.deferred import Tensor, torch


@dataclasses.dataclass(frozen=True)
class VespoOptions:
    """The kernel W^k·e^{λ(1 − W)}; it is largest at W = k/λ. The defaults are those of the paper's code and of TRL."""

    k_positive: float = positive_finite(2.0, "exponent k of the kernel where the advantage is 0 or more (2602.10693)")
    lambda_positive: float = positive_finite(3.0, "decay λ of the kernel where the advantage is 0 or more (2602.10693)")
    k_negative: float = positive_finite(3.0, "exponent k of the kernel where the advantage is below 0 (2602.10693)")
    lambda_negative: float = positive_finite(2.0, "decay λ of the kernel where the advantage is below 0 (2602.10693)")


def vespo(tokens: PolicyTokens, options: VespoOptions) -> PolicyTerms:
    """−sg[φ(W)]·A·log π_θ, φ(W) = W^k·e^{λ(1 − W)}, W = Π π_θ/μ over the response; `clipped` is always False.

    VESPO (arXiv 2602.10693). k and λ are chosen by the sign of A; φ(1) = 1.
    """
    advantages = tokens.advantages.detach()
    log_weight = response_log_ratio((tokens.logprobs - tokens.behaviour_logprobs).detach(), tokens)

    def by_sign(positive: float, negative: float) -> Tensor:
        return torch.where(advantages >= 0, log_weight.new_full((), positive), log_weight.new_full((), negative))

    k = by_sign(options.k_positive, options.k_negative)
    decay = by_sign(options.lambda_positive, options.lambda_negative)
    kernel = (k * log_weight + decay * (1 - log_weight.exp())).exp().to(tokens.logprobs.dtype)
    loss = -kernel * advantages * tokens.logprobs
    return PolicyTerms(loss, torch.zeros_like(tokens.response_mask), tokens.approx_kl)


LOSSES = (PolicyLoss("vespo", vespo, VespoOptions(), reads_rollout=True),)
