"""FIPO: a token's advantage is scaled by how the policy has moved on the tokens after it."""

import dataclasses
import math

from megarl.algorithms.policy_loss import ClipOptions, PolicyLoss, PolicyTerms, PolicyTokens, positive
from megarl.algorithms.policy_losses.ppo_clip import ppo_clip
from megarl.algorithms.returns import discounted_sums


@dataclasses.dataclass(frozen=True)
class FipoOptions(ClipOptions):
    """PPO's clip range, and the influence of later tokens."""

    half_life: float = positive(32.0, "tokens after which the influence of a later token has halved (2603.19835)")
    range: float = positive(0.2, "ε: the influence is held in [1, 1 + ε] (2603.19835)")


def fipo(tokens: PolicyTokens, options: FipoOptions) -> PolicyTerms:
    """`ppo_clip` with the advantage A·sg[clip(exp(Σ_{k≥t} γ^{k−t}·log r_k), 1, 1 + ε)], γ = 2^{−1/half-life}.

    FIPO (arXiv 2603.19835). The sum is over the response's own tokens, observations skipped. With `--dual-clip` c,
    tokens whose ratio is above c are left out of it, as in the paper's code.
    """
    log_ratio = (tokens.logprobs - tokens.old_logprobs).detach().double()
    if options.dual is not None:
        log_ratio = log_ratio.masked_fill(log_ratio > math.log(options.dual), 0.0)
    factor = 2.0 ** (-1.0 / options.half_life)
    later = discounted_sums(log_ratio, tokens.response_mask, tokens.cu_seqlens, factor)
    influence = later.clamp(0.0, math.log1p(options.range)).exp().to(tokens.logprobs.dtype)
    return ppo_clip(dataclasses.replace(tokens, advantages=tokens.advantages.detach() * influence), options)


LOSSES = (PolicyLoss("fipo", fipo, FipoOptions()),)
