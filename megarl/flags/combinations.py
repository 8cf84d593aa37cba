"""Which flags work together: flags without effect in a run, and broken rules, each with its reason."""

from megarl.errors import UsageError
from megarl.flags.conditions import Condition, FlagContext
from megarl.flags.correction import is_corrected
from megarl.flags.settings import rules


def without_effect(run: FlagContext, given: dict[str, Condition | None]) -> dict[str, str]:
    """Given flags that have no effect in a run, with the reason.

    Args:
        given: flags of the command line and the config files -> the condition under which each has an effect; None:
            always.
    """
    reasons = {flag: condition.why_not(run) for flag, condition in given.items() if condition is not None}
    return {flag: reason for flag, reason in reasons.items() if reason is not None}


def warning(idle: dict[str, str]) -> list[str]:
    """One line that names the flags without effect, grouped by reason; none without any."""
    if not idle:
        return []
    by_reason: dict[str, list[str]] = {}
    for flag, why in idle.items():
        by_reason.setdefault(why, []).append(flag)
    return ["without effect: " + "; ".join(f"{', '.join(flags)} ({why})" for why, flags in by_reason.items())]


def cautions(run: FlagContext) -> list[str]:
    """Warnings about combinations that run, but seldom as the user expects."""
    s, found = run.settings, []
    if "parts" in run.estimator.needs and not s.part_weights:
        found.append(f"--advantage {s.advantage}: --reward {s.reward} has one part that counts, so that there are no "
                     "others to tell apart")  # fmt: skip
    if (sizes := s.uneven_minibatches) is not None and not s.debug_rollout_only:
        found.append(f"--minibatch-size {s.minibatch_size}: the last mini-batch of a step has {sizes[0]} responses "
                     f"instead of {sizes[1]}, and is an update like the others")  # fmt: skip
    if not s.generation_lag or is_corrected(run) or s.debug_rollout_only:
        return found
    return [
        *found,
        f"--generation-lag {s.generation_lag} without --rollout-correction: responses are up to {s.generation_lag} "
        "updates old, and the loss takes them for the trained policy's",
    ]


def check(run: FlagContext):
    """UsageError for the first broken rule."""
    for rule in rules(run):
        raise UsageError(rule.problem(run.settings))
