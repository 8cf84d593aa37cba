"""Off-policy sequence masking: bad responses that the policy has moved away from are not pushed down further."""

from megarl.algorithms.policy_loss import PolicyTokens, on_tokens, response_mean
from megarl.deferred import Tensor, no_grad


@no_grad
def off_policy_kept(tokens: PolicyTokens, threshold: float) -> Tensor:
    """[T] bool: False at response tokens with A < 0 of a response whose mean of log(μ/π_θ) is above the threshold.

    DeepSeek-V3.2 (arXiv 2512.02556, eq. 9), whose π_old is what the inference engine reports, here μ. A dropped token
    still counts in the denominators of the loss.
    """
    distance = response_mean(tokens.behaviour_logprobs - tokens.logprobs, tokens)
    is_far = on_tokens((distance > threshold).double(), tokens) > 0
    return ~(is_far & (tokens.advantages < 0))
