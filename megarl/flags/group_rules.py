"""Groups of responses whose size a file of a mixture says (`samples-per-prompt`), and what a run needs of them."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from fractions import Fraction

from megarl.data.column_names import RL
from megarl.data.mixture import TRAINING, MixtureEntry, is_mixture, read_mixture
from megarl.errors import Rule, UsageError
from megarl.flags.conditions import FlagContext
from megarl.flags.settings import Settings


def group_sizes(settings: Settings) -> set[int]:
    """The sizes that groups of a step may have. UsageError for a mixture that cannot be read."""
    return {entry.samples_per_prompt or settings.samples_per_prompt for entry in _entries(settings)}


def expected_responses(settings: Settings) -> int:
    """Responses of a step in which each file of a mixture has its share, rounded up. UsageError as of `group_sizes`."""
    s, entries = settings, _entries(settings)
    weights = sum(entry.weight for entry in entries)
    responses = sum(entry.weight * (entry.samples_per_prompt or s.samples_per_prompt) for entry in entries)
    return math.ceil(s.prompts_per_step * responses / weights)


def check_sizes(context: FlagContext, rules: Callable[[FlagContext], Iterable[Rule]]):
    """UsageError for a file whose groups the run cannot have: `rules` as if all groups had their size."""
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
