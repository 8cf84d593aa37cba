"""IPO: the difference of the drifts is to have a given value, so that it does not grow without end."""

from megarl.algorithms.preference_loss import (
    PairLogprobs,
    PreferenceLoss,
    PreferenceOptions,
    PreferenceTerms,
    drifts,
    terms_of,
)


def ipo(pairs: PairLogprobs, options: PreferenceOptions) -> PreferenceTerms:
    """(d_w − d_l − 1/(2β))², where d is the drift log π − log π_ref as a mean over a response's tokens.

    2310.12036 eq. 17 has sums; means, as its authors use them in their experiments, do not depend on lengths.
    """
    chosen, rejected = drifts(pairs)
    chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
    loss = (chosen - rejected - 1 / (2 * options.beta)).square()
    return terms_of(loss, options.beta * chosen, options.beta * rejected)


LOSS = PreferenceLoss("ipo", ipo, frozenset({"beta"}), needs_reference=True)
