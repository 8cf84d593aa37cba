"""GSPO, its token form, and LUSPO: one ratio for a whole response."""

from megarl.algorithms.packed import broadcast_to_tokens, response_counts
from megarl.algorithms.policy_loss import (
    ClipRange,
    PolicyLoss,
    PolicyTerms,
    PolicyTokens,
    clipped_surrogate,
    on_tokens,
    response_mean,
)  # fmt: skip

LOG_RATIO_LIMIT = 10.0  # upper bound of log s (a ratio of 22,026, as in verl), without which exp overflows


def gspo(tokens: PolicyTokens, clip: ClipRange) -> PolicyTerms:
    """max(−A·s, −A·clip(s, 1−low, 1+high)) with the sequence ratio s = exp(mean over the response of log r).

    GSPO (arXiv 2507.18071, §4.1, eq. 5 and 7). Each response has one advantage A: the mean over its tokens where they
    differ. Its loss is repeated on each token, so `seq-mean-token-mean` gives the paper's objective.
    """
    log_ratio = tokens.logprobs - tokens.old_logprobs.detach()
    ratio = response_mean(log_ratio, tokens).clamp(max=LOG_RATIO_LIMIT).exp()
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
    ratio = (sequence_log_ratio + (tokens.logprobs - tokens.logprobs.detach())).clamp(max=LOG_RATIO_LIMIT).exp()
    loss, clipped = clipped_surrogate(ratio, tokens.advantages.detach(), clip)
    return PolicyTerms(loss, clipped, -log_ratio.detach())


def luspo(tokens: PolicyTokens, clip: ClipRange) -> PolicyTerms:
    """|o| times the loss of `gspo`, which prefers short responses: with `seq-mean-token-mean` one weighs its length.

    LUSPO (arXiv 2602.05261).
    """
    terms = gspo(tokens, clip)
    lengths = response_counts(tokens.response_mask, tokens.cu_seqlens)
    return terms._replace(loss=on_tokens(lengths, tokens) * terms.loss)


LOSSES = (
    PolicyLoss("gspo", gspo, ClipRange()),
    PolicyLoss("gspo-token", gspo_token, ClipRange()),
    PolicyLoss("luspo", luspo, ClipRange()),
)
