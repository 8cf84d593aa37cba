"""DPO: a policy is its own reward model."""

from megarl.algorithms.preference_loss import (
    PairLogprobs,
    PreferenceLoss,
    PreferenceOptions,
    PreferenceTerms,
    drifts,
    smoothed,
    terms_of,
)


def dpo(pairs: PairLogprobs, options: PreferenceOptions) -> PreferenceTerms:
    """−log σ(r_w − r_l − m) with the implicit rewards r = β·(log π − log π_ref) (2305.18290 eq. 7).

    A margin m is the offset of ODPO (2402.10571); `label_smoothing` is that of `smoothed`.
    """
    chosen, rejected = (options.beta * drift for drift in drifts(pairs))
    return terms_of(smoothed(chosen, rejected, pairs.margin, options.label_smoothing), chosen, rejected)


LOSS = PreferenceLoss(
    "dpo", dpo, frozenset({"beta", "label_smoothing"}), needs_reference=True, reads_margin=True
)  # fmt: skip
