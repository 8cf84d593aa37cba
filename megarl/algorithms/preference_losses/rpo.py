"""RPO: DPO with the fine-tuning loss of the preferred response, which keeps its probability from falling."""

from megarl.algorithms.preference_loss import (
    PairLogprobs,
    PreferenceLoss,
    PreferenceOptions,
    PreferenceTerms,
    token_means,
)
from megarl.algorithms.preference_losses.dpo import dpo


def rpo(pairs: PairLogprobs, options: PreferenceOptions) -> PreferenceTerms:
    """DPO's loss − α · the mean log-prob of the preferred response's tokens (2404.19733 eq. 1)."""
    terms = dpo(pairs, options)
    return terms._replace(loss=terms.loss - options.coefficient * token_means(pairs)[0])


LOSS = PreferenceLoss(
    "rpo", rpo, frozenset({"beta", "label_smoothing", "coefficient"}), needs_reference=True, reads_margin=True
)  # fmt: skip
