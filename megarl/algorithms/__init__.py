"""Pure tensor functions of reinforcement learning: advantages, losses, KL, aggregation. Imports only torch.

What a flag chooses by name is a row of a table here, or of `policy_losses`.
"""

from functools import partial

from megarl.algorithms import estimators, group_advantages
from megarl.algorithms.estimators import NO_ADVANTAGE, Estimator, by_group
from megarl.algorithms.preference_losses import PreferenceLoss, PreferenceOptions, dpo, ipo, kto, orpo, rpo, simpo

_GRPO = partial(by_group, group_advantages.grpo, reads_std=True)
_BEST = partial(by_group, group_advantages.best_of_group, reads_std=True)
_CENTRED = partial(by_group, group_advantages.centred)
_MAXRL = partial(by_group, group_advantages.maxrl)
_PREFERENCE = estimators.preference_advantages
# Name in --advantage -> function, what it needs, the options that it reads, and whether it whitens by default.
ESTIMATORS: dict[str, Estimator] = {
    name: Estimator(function, frozenset(needs.split()), frozenset(options.split()), whitens)
    for name, function, needs, options, whitens in (
        ("gae", estimators.gae_advantages, "values", "gamma lam length_alpha whiten", True),
        ("grpo", _GRPO, "groups", "group_std whiten", False),
        ("rloo", estimators.rloo_advantages, "groups", "credit_turns whiten", False),
        ("opo", estimators.opo_advantages, "groups", "whiten", False),
        ("reinforce++", estimators.reinforce_plus_plus_advantages, "", "gamma whiten", True),
        # Whitening moves the zeros of equal groups, too, by the token mean of the batch.
        ("reinforce++-baseline", _CENTRED, "groups", "whiten", True),
        ("maxrl", _MAXRL, "groups", "whiten", False),
        ("pass-at-k", _BEST, "groups", "group_std whiten", False),
        ("gdpo", estimators.gdpo_advantages, "groups parts", "group_std whiten", True),
        ("otb", estimators.otb_advantages, "groups squares", "whiten", False),
        ("remax", estimators.remax_advantages, "baselines", "whiten", False),
        (NO_ADVANTAGE, estimators.no_advantages, "", "", False),
        ("preference", _PREFERENCE, "groups logprobs", "preference", False),
    )
}
ESTIMATORS["preference"] = ESTIMATORS["preference"]._replace(measured=estimators.measured_preference)
_BETA_OF_SIMPO = PreferenceOptions(beta=2.0)
# Name in --preference-loss -> function, the options that it reads, and what else is its own.
PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    name: PreferenceLoss(name, function, frozenset(options.split()), **own)
    for name, function, options, own in (
        ("dpo", dpo, "beta label_smoothing", dict(reads_margin=True)),
        ("ipo", ipo, "beta", {}),
        ("simpo", simpo, "beta gamma label_smoothing", dict(needs_reference=False, defaults=_BETA_OF_SIMPO)),
        ("orpo", orpo, "coefficient", dict(needs_reference=False, defaults=PreferenceOptions(coefficient=0.1))),
        ("rpo", rpo, "beta label_smoothing coefficient", dict(reads_margin=True)),
        ("kto", kto, "beta desirable_weight undesirable_weight", dict(reads_pairs=False)),
    )
}
