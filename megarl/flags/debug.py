"""Flags that find faults: rollouts kept and replayed, half of a run alone, profiles of single steps."""

import dataclasses
import re
from collections.abc import Iterator

from megarl.flags.conditions import SAVED, Broken, FlagContext, on
from megarl.flags.fields import TRAINING, flag, parses

STEP_RANGE = re.compile(r"([1-9][0-9]{0,17})(?:-([1-9][0-9]{0,17}))?")
PROFILE = on(lambda s: s.profile_steps is not None, "needs --profile-steps")


def parse_step_range(text: str) -> range:
    """`"3-5"` -> the steps 3, 4, 5; `"3"` -> step 3. ValueError for other text."""
    match = STEP_RANGE.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if last < first:
        raise ValueError(f"{text!r} is no range of steps")
    return range(first, last + 1)


@dataclasses.dataclass(frozen=True)
class Debug:
    """Debugging."""

    save_rollouts: bool = flag(False, needs=SAVED)
    """write the responses of each step to rollouts/step_N in --save"""
    load_rollouts: str | None = flag(None)
    """run folder, or its rollouts folder, whose saved responses --debug-train-only trains on"""
    debug_train_only: bool = flag(False)
    """no engine and no generation: each step trains on its responses in --load-rollouts, with rewards computed again"""
    debug_rollout_only: bool = flag(False)
    """generate and score, without critic, reference, optimizer and updates"""
    profile_steps: str | None = flag(
        None, parses(parse_step_range), "a step or a range of steps, as 3-5", programs=TRAINING, needs=SAVED
    )
    """steps to profile, as '3' or '3-5': operators and phases of --profile-ranks go to profile/ in --save"""
    profile_memory: bool = flag(False, programs=TRAINING, when=PROFILE)
    """with --profile-steps also record the memory that operators allocate"""


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of half a run."""
    s = run.settings
    if s.debug_train_only and s.load_rollouts is None:
        yield "--debug-train-only", "needs --load-rollouts: without an engine the responses come from a folder"
    if s.load_rollouts is not None and not s.debug_train_only:
        yield "--load-rollouts", "needs --debug-train-only: other runs generate their responses"
    if s.debug_rollout_only and s.debug_train_only:
        yield "--debug-rollout-only", "not allowed with --debug-train-only: nothing would be left of a step"
    if s.save_rollouts and s.debug_train_only:
        yield "--save-rollouts", "not allowed with --debug-train-only: they are in --load-rollouts already"
