"""Flags of training on preference pairs: of reward models (train_reward) and of policies (train_preference)."""

import dataclasses

from megarl.algorithms.preference_loss import PreferenceOptions
from megarl.algorithms.preference_losses import PREFERENCE_LOSSES
from megarl.flags.fields import flag, fraction, not_negative, one_of, positive

PAIRS = "preference reward"
LOSSES = "preference rl"


def _with_option(option: str) -> str:
    return ", ".join(name for name, loss in PREFERENCE_LOSSES.items() if option in loss.options)


@dataclasses.dataclass(frozen=True)
class PreferenceSettings:
    """Losses of pairs, and the columns that they are in."""

    chosen_column: str | None = flag(None, "column of the better responses; default: chosen", programs=PAIRS)
    rejected_column: str | None = flag(None, "column of the worse responses; default: rejected", programs=PAIRS)
    desirable_column: str | None = flag(None, "column that says whether a response is desirable; default: desirable or"
                                     " label", programs="preference", when="labels")  # fmt: skip
    preference_margin: float = not_negative(0.0, "margin added to each pair's own margin (2307.09288 eq. 2)",
                                             programs=PAIRS, when="margin")  # fmt: skip
    centring_coefficient: float = not_negative(0.0, "coefficient of the (chosen + rejected)² loss that centres scores"
                                                " (2312.09244)", programs="reward")  # fmt: skip
    target_eval_accuracy: float | None = fraction(None, "stop the run when this fraction of held-out pairs is ranked"
                                                   " correctly; default: never", programs=PAIRS)  # fmt: skip
    preference_loss: str = one_of("dpo", tuple(PREFERENCE_LOSSES), "loss of pairs: dpo (2305.18290), ipo (2310.12036),"
                                   " simpo (2405.14734), orpo (2403.07691) or rpo (2404.19733); kto"
                                   " (2402.01306) is of single responses",
                                   programs="rl preference", when="preference")  # fmt: skip
    preference_beta: float | None = positive(None, f"β of {_with_option('beta')}; default: 0.1, of simpo 2",
                                              programs=LOSSES, when="preference:beta")  # fmt: skip
    preference_label_smoothing: float = flag(0.0, f"probability ε that a label is wrong, in"
                                              f" {_with_option('label_smoothing')}", lambda v: 0 <= v < 0.5,
                                              "from 0 to below 0.5", programs=LOSSES,
                                              when="preference:label_smoothing")  # fmt: skip
    preference_desirable_weight: float = positive(1.0, "kto: weight λ_D of desirable responses", programs="preference",
                                                   when="preference:desirable_weight")  # fmt: skip
    preference_undesirable_weight: float = positive(1.0, "kto: weight λ_U of undesirable responses",
                                                     programs="preference",
                                                     when="preference:undesirable_weight")  # fmt: skip
    preference_gamma: float = not_negative(1.0, "simpo: difference γ between the rewards of a pair",
                                            programs=LOSSES, when="preference:gamma")  # fmt: skip
    preference_coefficient: float | None = not_negative(None, "weight of the second term: λ of orpo (default 0.1), α of"
                                                         " rpo (default 1)", programs=LOSSES,
                                                         when="preference:coefficient")  # fmt: skip


def preference_options(settings: PreferenceSettings) -> PreferenceOptions:
    """The options of the run's loss: values of flags, and the loss's own defaults."""
    s, defaults = settings, PREFERENCE_LOSSES[settings.preference_loss].defaults
    return PreferenceOptions(
        beta=defaults.beta if s.preference_beta is None else s.preference_beta,
        label_smoothing=s.preference_label_smoothing,
        gamma=s.preference_gamma,
        coefficient=defaults.coefficient if s.preference_coefficient is None else s.preference_coefficient,
        desirable_weight=s.preference_desirable_weight,
        undesirable_weight=s.preference_undesirable_weight,
    )
