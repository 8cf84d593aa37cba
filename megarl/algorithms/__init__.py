"""Pure tensor functions of reinforcement learning: advantages, losses, KL, aggregation. Imports only torch.

What a flag chooses by name is a row of a table here, or of `policy_losses`.
"""

from functools import partial

from megarl.algorithms import estimators, group_advantages, preference_losses
from megarl.algorithms.estimators import NO_ADVANTAGE, Estimator, by_group
from megarl.algorithms.preference_losses import DPO, PreferenceLoss, PreferenceOptions

# Name in --advantage -> function, what it needs, the options that it reads, and whether it whitens by default.
ESTIMATORS: dict[str, Estimator] = {
    name: Estimator(function, frozenset(needs), frozenset(options), whitens, *measured)
    for name, function, needs, options, whitens, *measured in (
        ("gae", estimators.gae_advantages, ["values"], ["gamma", "lam", "length_alpha", "whiten"], True),
        ("grpo", partial(by_group, group_advantages.grpo, reads_std=True), ["groups"], ["group_std", "whiten"], False),
        ("rloo", estimators.rloo_advantages, ["groups"], ["credit_turns", "whiten"], False),
        ("opo", estimators.opo_advantages, ["groups"], ["whiten"], False),
        ("reinforce++", estimators.reinforce_plus_plus_advantages, [], ["gamma", "whiten"], True),
        # Whitening moves the zeros of equal groups, too, by the token mean of the batch.
        ("reinforce++-baseline", partial(by_group, group_advantages.centred), ["groups"], ["whiten"], True),
        ("maxrl", partial(by_group, group_advantages.maxrl), ["groups"], ["whiten"], False),
        (
            "pass-at-k",
            partial(by_group, group_advantages.best_of_group, reads_std=True),
            ["groups"],
            ["group_std", "whiten"],
            False,
        ),
        ("gdpo", estimators.gdpo_advantages, ["groups", "parts"], ["group_std", "whiten"], True),
        ("otb", estimators.otb_advantages, ["groups", "squares"], ["whiten"], False),
        ("remax", estimators.remax_advantages, ["baselines"], ["whiten"], False),
        (NO_ADVANTAGE, estimators.no_advantages, [], [], False),
        (
            "preference",
            estimators.preference_advantages,
            ["groups", "logprobs"],
            ["preference"],
            False,
            estimators.measured_preference,
        ),
    )
}
PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    loss.name: loss
    for loss in (
        DPO,
        PreferenceLoss("ipo", preference_losses.ipo, frozenset({"beta"})),
        PreferenceLoss(
            "simpo",
            preference_losses.simpo,
            frozenset({"beta", "gamma", "label_smoothing"}),
            needs_reference=False,
            defaults=PreferenceOptions(beta=2.0),
        ),
        PreferenceLoss(
            "orpo",
            preference_losses.orpo,
            frozenset({"coefficient"}),
            needs_reference=False,
            defaults=PreferenceOptions(coefficient=0.1),
        ),
        PreferenceLoss(
            "rpo", preference_losses.rpo, frozenset({"beta", "label_smoothing", "coefficient"}), reads_margin=True
        ),
        PreferenceLoss(
            "kto",
            preference_losses.kto,
            frozenset({"beta", "desirable_weight", "undesirable_weight"}),
            reads_pairs=False,
        ),
    )
}
