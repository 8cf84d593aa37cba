"""Which flags work together: flags without effect in a run, and broken rules, each with its reason.

Files of a mixture may have groups of their own sizes (`samples-per-prompt`), for which the rules hold, too.
"""

import dataclasses
import math
from fractions import Fraction

from megarl.data.mixture import TRAINING, MixtureEntry, is_mixture, read_mixture
from megarl.data.prompt import RL
from megarl.errors import UsageError
from megarl.flags.conditions import Condition, FlagContext
from megarl.flags.correction import is_corrected
from megarl.flags.settings import Settings, rules


def without_effect(run: FlagContext, given: dict[str, Condition | None]) -> dict[str, str]:
    """Given flags that have no effect in a run, with the reason. `given`: flag -> the condition under which it has one;
    None: always."""
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
        found.append(
            f"--advantage {s.advantage}: --reward {s.reward} has one part that counts, so that there are no "
            "others to tell apart"
        )
    if (sizes := s.uneven_minibatches) is not None and not s.debug_rollout_only:
        found.append(
            f"--minibatch-size {s.minibatch_size}: the last mini-batch of a step has {sizes[0]} responses "
            f"instead of {sizes[1]}, and is an update like the others"
        )
    if not s.generation_lag or is_corrected(run) or s.debug_rollout_only:
        return found
    return [
        *found,
        f"--generation-lag {s.generation_lag} without --rollout-correction: responses are up to {s.generation_lag} "
        "updates old, and the loss takes them for the trained policy's",
    ]


def check(run: FlagContext):
    """UsageError for the first broken rule, then for a file of a mixture whose groups the run cannot have."""
    for rule in rules(run):
        raise UsageError(rule.problem(run.settings))
    if run.program == "rl":
        _check_sizes(run)


def group_sizes(settings: Settings) -> set[int]:
    """The sizes that groups of a step may have. UsageError for a mixture that cannot be read."""
    return {entry.samples_per_prompt or settings.samples_per_prompt for entry in _entries(settings)}


def expected_responses(settings: Settings) -> int:
    """Responses of a step in which each file of a mixture has its share, rounded up. UsageError as of `group_sizes`."""
    s, entries = settings, _entries(settings)
    weights = sum(entry.weight for entry in entries)
    responses = sum(entry.weight * (entry.samples_per_prompt or s.samples_per_prompt) for entry in entries)
    return math.ceil(s.prompts_per_step * responses / weights)


def _check_sizes(context: FlagContext):
    """The rules hold as if all groups had the size of a file's."""
    s, size = context.settings, context.settings.minibatch_size
    for entry in _entries(s):
        samples = entry.samples_per_prompt
        if samples is None or samples == s.samples_per_prompt:
            continue
        where = f"{TRAINING} {s.prompts}: {entry.name}: samples-per-prompt {samples}"
        own = dataclasses.replace(s, samples_per_prompt=samples, minibatch_size=None)
        for rule in rules(context._replace(settings=own)):
            is_of_size = rule.flag == "--samples-per-prompt"
            raise UsageError(f"{where}: {rule.reason if is_of_size else rule.problem(own)}")
        if size is not None and size % s.samples_per_prompt:
            raise UsageError(
                f"--minibatch-size {size}: {where} differs from --samples-per-prompt, so that mini-batches have whole "
                f"groups, each counted as {s.samples_per_prompt}; allowed are multiples of {s.samples_per_prompt}"
            )


def _entries(settings: Settings) -> tuple[MixtureEntry, ...]:
    """The entries of `--prompts`; without a mixture one that says nothing."""
    path = settings.prompts
    if path is not None and is_mixture(path):
        return read_mixture(path, TRAINING, RL)
    return (MixtureEntry("", path or "", Fraction(1)),)
