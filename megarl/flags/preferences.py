"""Flags of preferences: losses of pairs, for reward models and for policies."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

from megarl.algorithms import PREFERENCE_LOSSES
from megarl.algorithms.preference_losses import PreferenceLoss, PreferenceOptions
from megarl.flags.conditions import Broken, Condition, FlagContext
from megarl.flags.fields import PAIRS, flag, fraction, not_negative, one_of, positive

LOSSES = "preference rl"


def _with_option(option: str) -> tuple[str, ...]:
    return tuple(name for name, loss in PREFERENCE_LOSSES.items() if option in loss.options)


def _learns_preferences(run: FlagContext) -> bool:
    return run.program != "rl" or "preference" in run.estimator.options


PREFERENCES = Condition(_learns_preferences, "--advantage {advantage} does not use them")


def _of_loss(holds: Callable[[PreferenceLoss], bool]) -> Condition:
    """A condition on the loss; a reward model's has all options."""
    return Condition(
        lambda run: run.program == "reward" or holds(PREFERENCE_LOSSES[run.settings.preference_loss]),
        "--preference-loss {preference_loss} does not use them",
        first=PREFERENCES,
    )


@functools.cache
def of_preference(option: str) -> Condition:
    """The condition that the preference loss has an option."""
    return _of_loss(lambda loss: option in loss.options)


LABELS = _of_loss(lambda loss: not loss.reads_pairs)
MARGIN = _of_loss(lambda loss: loss.reads_margin)


@dataclasses.dataclass(frozen=True)
class Preferences:
    """Preferences."""

    preference_loss: str = one_of("dpo", tuple(PREFERENCE_LOSSES), programs="rl preference", when=PREFERENCES)
    """loss of pairs: dpo (2305.18290), ipo (2310.12036), simpo (2405.14734), orpo (2403.07691) or rpo (2404.19733); kto
    (2402.01306) is of single responses"""
    preference_beta: float | None = positive(
        None, programs=LOSSES, names=_with_option("beta"), when=of_preference("beta")
    )
    """β of {names}; default: 0.1, of simpo 2"""
    preference_label_smoothing: float = flag(
        0.0,
        lambda v: 0 <= v < 0.5,
        "from 0 to below 0.5",
        programs=LOSSES,
        names=_with_option("label_smoothing"),
        when=of_preference("label_smoothing"),
    )
    """probability ε that a label is wrong, in {names}"""
    preference_gamma: float = not_negative(1.0, programs=LOSSES, when=of_preference("gamma"))
    """simpo: difference γ between the rewards of a pair"""
    preference_coefficient: float | None = not_negative(None, programs=LOSSES, when=of_preference("coefficient"))
    """weight of the second term: λ of orpo (default 0.1), α of rpo (default 1)"""
    preference_desirable_weight: float = positive(1.0, programs="preference", when=of_preference("desirable_weight"))
    """kto: weight λ_D of desirable responses"""
    preference_undesirable_weight: float = positive(
        1.0, programs="preference", when=of_preference("undesirable_weight")
    )
    """kto: weight λ_U of undesirable responses"""
    preference_margin: float = not_negative(0.0, programs=PAIRS, when=MARGIN)
    """margin added to each pair's own margin (2307.09288 eq. 2)"""
    centring_coefficient: float = not_negative(0.0, programs="reward")
    """coefficient of the (chosen + rejected)² loss that centres scores (2312.09244)"""
    target_eval_accuracy: float | None = fraction(None, programs=PAIRS)
    """stop the run when this fraction of held-out pairs is ranked correctly; default: never"""


def preference_options(settings: Preferences) -> PreferenceOptions:
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


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of `--advantage preference`."""
    s = run.settings
    if "logprobs" not in run.estimator.needs:
        return
    of_pairs = [name for name, loss in PREFERENCE_LOSSES.items() if loss.reads_pairs]
    if s.preference_loss not in of_pairs:
        why = f"reads single responses; allowed with --advantage preference are {', '.join(of_pairs)}"
        yield "--preference-loss", why
    if s.policy_loss != "reinforce":
        why = "--advantage preference needs reinforce, whose gradient is then that of --preference-loss"
        yield "--policy-loss", why
    if s.loss_aggregation != "seq-mean-token-sum":
        why = "--advantage preference needs seq-mean-token-sum, whose gradient is then that of --preference-loss"
        yield "--loss-aggregation", why
    if s.updates_per_step != 1:
        yield (
            "--advantage",
            "is the gradient before the step; allowed is one update a step: --ppo-epochs 1, and a "
            "--minibatch-size of the whole batch",
        )
    if s.kl_in != "loss" and s.kl_coefficient:
        yield "--advantage", "compares rewards without a KL; needs --kl-coefficient 0 or --kl-in loss"
    if s.rollout_correction != "none":
        yield "--rollout-correction", "--advantage preference needs none: a pair may be of any policy's responses"
    if s.old_logprobs != "recompute":
        yield "--old-logprobs", "--advantage preference needs recompute: its gradient is at the policy before the step"
    if s.rollout_rejection is not None:
        yield "--rollout-rejection", "not allowed with --advantage preference: a pair would lose one of its responses"
    if s.mask_truncated_responses:
        why = "not allowed with --advantage preference: a pair would lose one of its responses"
        yield "--mask-truncated-responses", why
