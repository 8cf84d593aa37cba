"""SimPO: the mean log-prob is the reward, and no reference is needed."""

from megarl.algorithms.preference_loss import (
    PairLogprobs,
    PreferenceLoss,
    PreferenceOptions,
    PreferenceTerms,
    smoothed,
    terms_of,
    token_means,
)


def simpo(pairs: PairLogprobs, options: PreferenceOptions) -> PreferenceTerms:
    """−log σ(r_w − r_l − γ) with rewards r = β · the mean log-prob of a response's tokens (2405.14734 eq. 6)."""
    chosen, rejected = (options.beta * mean for mean in token_means(pairs))
    gamma = chosen.new_full(chosen.shape, options.gamma)
    return terms_of(smoothed(chosen, rejected, gamma, options.label_smoothing), chosen, rejected)


LOSS = PreferenceLoss(
    "simpo", simpo, frozenset({"beta", "gamma", "label_smoothing"}), needs_reference=False,
    defaults=PreferenceOptions(beta=2.0),
)  # fmt: skip
