"""Policy losses of whole responses: GSPO, its token form, and GMPO, before aggregation.

Only response tokens count in the statistics of a response; observation tokens between the turns of it do not. Means
over a response are taken in float64: a response of many thousand tokens then loses no digits of its ratio, and the
ratio does not depend on what else is in the micro-batch.
"""

import torch
from torch import Tensor

from megarl.algorithms.packed import response_counts, spread, sums_by_sequence
from megarl.algorithms.policy_loss import ClipOptions, PolicyTerms, PolicyTokens, clipped_surrogate


def gspo(tokens: PolicyTokens, clip: ClipOptions, log_ratio_limit: float = 10.0) -> PolicyTerms:
    """max(−A·s, −A·clip(s, 1−low, 1+high)) with the sequence ratio s = exp(mean over the response of log r).

    GSPO (arXiv 2507.18071, §4.1, eq. 5 and 7). Each response has one advantage A: the mean over its tokens where they
    differ. Its loss stands on each of its tokens, so `seq-mean-token-mean` gives the paper's objective.

    Args:
        log_ratio_limit: log s is held to at most this (10: a ratio of 22,026, as in verl), else exp overflows.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs.detach()
    ratio = _response_mean(log_ratio, tokens).clamp(max=log_ratio_limit).exp()
    loss, clipped = clipped_surrogate(ratio, _response_mean(tokens.advantages.detach(), tokens), clip)
    clipped = spread(clipped, tokens.response_mask, tokens.cu_seqlens)
    return PolicyTerms(_on_tokens(loss, tokens), clipped, -log_ratio.detach())


def gspo_token(tokens: PolicyTokens, clip: ClipOptions, log_ratio_limit: float = 10.0) -> PolicyTerms:
    """GSPO's token form: like `gspo`, but with the ratio s_t = sg[s]·π_θ/sg[π_θ] and the advantage A_t of each token.

    arXiv 2507.18071, §4.3, eq. 13 and 14. Where all A_t of a response are equal, loss and gradient are those of `gspo`
    under any aggregation that weighs the tokens of a response alike. `log_ratio_limit` as there.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs.detach()
    sequence_log_ratio = _on_tokens(_response_mean(log_ratio.detach(), tokens), tokens)
    # logprobs − sg[logprobs] is exactly 0: it changes no value and carries the gradient.
    ratio = (sequence_log_ratio + (tokens.logprobs - tokens.logprobs.detach())).clamp(max=log_ratio_limit).exp()
    loss, clipped = clipped_surrogate(ratio, tokens.advantages.detach(), clip)
    return PolicyTerms(loss, clipped, -log_ratio.detach())


def gmpo(tokens: PolicyTokens, clip: ClipOptions, log_ratio_limit: float = 20.0) -> PolicyTerms:
    """−A·exp(mean over the response of clipped log r): the geometric mean of the clipped ratios.

    GMPO (arXiv 2507.20673). Each token is clipped on the side that its advantage's sign pulls to, and in log
    space: log r ≤ high where A_t > 0, log r ≥ −low where A_t < 0 (the paper has 0.4 on both sides); a token with
    A_t = 0 counts as a ratio of 1. A is the mean of the A_t: the paper has one advantage a response. The loss stands
    on each token of the response, so `seq-mean-token-mean` gives the paper's objective.

    Args:
        log_ratio_limit: the mean of log r is held to at most this, else exp overflows where A < 0.
    """
    log_ratio, advantages = tokens.logprobs - tokens.old_logprobs.detach(), tokens.advantages.detach()
    held = torch.where(advantages > 0, log_ratio.clamp(max=clip.high), log_ratio.clamp(min=-clip.low))
    held = torch.where(advantages == 0, torch.zeros_like(held), held)
    ratio = _response_mean(held, tokens).clamp(max=log_ratio_limit).exp()
    loss = -_response_mean(advantages, tokens) * ratio
    clipped = (advantages != 0) & (held != log_ratio)
    return PolicyTerms(_on_tokens(loss, tokens), clipped, -log_ratio.detach())


def _response_mean(values: Tensor, tokens: PolicyTokens) -> Tensor:
    """[N] float64 mean of `values` [T] over the response tokens of each sequence; 0 for an empty response."""
    counts = response_counts(tokens.response_mask, tokens.cu_seqlens)
    return sums_by_sequence(values.double(), tokens.response_mask, tokens.cu_seqlens) / counts.clamp(min=1)


def _on_tokens(values: Tensor, tokens: PolicyTokens) -> Tensor:
    """[N] -> [T] in the dtype of the log-probabilities."""
    return spread(values, tokens.response_mask, tokens.cu_seqlens).to(tokens.logprobs.dtype)
