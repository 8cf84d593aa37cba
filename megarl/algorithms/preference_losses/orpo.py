"""ORPO: fine-tuning on the preferred response, with a penalty on the odds of the other; no reference is needed."""

from torch.nn.functional import logsigmoid

from megarl.algorithms.preference_loss import (
    PairLogprobs,
    PreferenceLoss,
    PreferenceOptions,
    PreferenceTerms,
    log_odds,
    terms_of,
    token_means,
)


def orpo(pairs: PairLogprobs, options: PreferenceOptions) -> PreferenceTerms:
    """−mean log π(y_w) − λ·log σ(log odds_w − log odds_l) (2403.07691 eq. 6 and 7); rewards are λ · the means."""
    chosen, rejected = token_means(pairs)
    penalty = -logsigmoid(log_odds(chosen) - log_odds(rejected))
    loss = -chosen + options.coefficient * penalty
    return terms_of(loss, options.coefficient * chosen, options.coefficient * rejected)


LOSS = PreferenceLoss(
    "orpo", orpo, frozenset({"coefficient"}), needs_reference=False, defaults=PreferenceOptions(coefficient=0.1)
)  # fmt: skip
