"""LUSPO: GSPO without its preference for short responses."""

from megarl.algorithms.packed import response_counts
from megarl.algorithms.policy_loss import ClipRange, PolicyLoss, PolicyTerms, PolicyTokens, on_tokens
from megarl.algorithms.policy_losses.gspo import gspo


def luspo(tokens: PolicyTokens, clip: ClipRange) -> PolicyTerms:
    """|o| times the loss of `gspo`: with `seq-mean-token-mean` a response weighs its length.

    LUSPO (arXiv 2602.05261).
    """
    terms = gspo(tokens, clip)
    lengths = response_counts(tokens.response_mask, tokens.cu_seqlens)
    return terms._replace(loss=on_tokens(lengths, tokens) * terms.loss)


LOSSES = (PolicyLoss("luspo", luspo, ClipRange()),)
