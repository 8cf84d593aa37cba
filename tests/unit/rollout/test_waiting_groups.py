"""Groups that wait in a checkpoint: which runs can continue them, by the manifest alone."""

import json

import pytest

from megarl.errors import UsageError
from megarl.rollout import waiting_groups
from tests.helpers.programs import program, rl_argv

SIX = "--advantage grpo --prompts-per-step 6 --samples-per-prompt 2"
FILTER = "--group-filter reward --dynamic-sampling"
PARTIAL = "--partial-rollouts --over-sampling 1.5 --rollout-correction tis"
AHEAD, APART = "--one-step-off --rollout-correction tis", "--role-map actor=0;reward=0;reference=0;rollout=1"
OTHER = "groups of 2 responses that wait for their batch to be full; --samples-per-prompt"


def settings(folder, flags: str):
    return program("rl", rl_argv(folder, f"{flags} {APART}"), 2).settings


# Flags of the run, complete and unfinished groups, flags of its resume, what the message says; None: accepted.
RESUMES = [
    (f"{SIX} {FILTER}", 3, 0, f"{SIX} {FILTER}", None),
    (f"{SIX} {FILTER}", 3, 0, f"{SIX} {FILTER} --prompts-per-step 4", None),
    (f"{SIX} {FILTER}", 3, 0, f"{SIX} {FILTER} --prompts-per-step 3",
     "holds 3 groups that wait for their batch to be full; allowed is more than 3"),
    (f"{SIX} {FILTER}", 3, 0, f"{SIX} {FILTER} --samples-per-prompt 4", OTHER),
    (f"{SIX} {FILTER}", 0, 0, f"{SIX} --samples-per-prompt 4", None),
    (f"{SIX} {FILTER}", 3, 0, SIX, OTHER),
    (f"{SIX} {FILTER}", 3, 0, f"{SIX} {FILTER} {PARTIAL}", OTHER),
    (f"{SIX} {PARTIAL}", 0, 4, f"{SIX} {PARTIAL}", None),
    (f"{SIX} {PARTIAL}", 0, 4, SIX, "4 unfinished groups of 2 responses; add --partial-rollouts"),
    (f"{SIX} {AHEAD}", 6, 0, f"{SIX} {AHEAD}", None),
    (f"{SIX} {AHEAD}", 6, 0, SIX, "a batch of 6 groups was generated ahead; allowed are --one-step-off and"),
    (f"{SIX} {AHEAD}", 6, 0, f"{SIX} {AHEAD} --prompts-per-step 3", "a batch of 6 groups was generated ahead"),
]  # fmt: skip


@pytest.mark.parametrize("before, complete, unfinished, after, says", RESUMES)
def test_which_runs_continue_the_groups_of_a_checkpoint(before, complete, unfinished, after, says, tmp_path):
    entry = waiting_groups.manifest_entry(settings(tmp_path, before), complete, unfinished)
    manifest, present = json.loads(json.dumps(entry)), settings(tmp_path, after)
    if says is None:
        waiting_groups.check(manifest, present, has_new_prompts=False)
    else:
        with pytest.raises(UsageError) as caught:
            waiting_groups.check(manifest, present, has_new_prompts=False)
        assert says in str(caught.value) and "\n" not in str(caught.value)
    if complete or unfinished:
        with pytest.raises(UsageError, match="--load-changed-data: .* responses to the old prompts"):
            waiting_groups.check(manifest, settings(tmp_path, before), has_new_prompts=True)


def test_a_checkpoint_that_says_nothing_of_groups_is_not_compared(tmp_path):
    waiting_groups.check({}, settings(tmp_path, SIX), has_new_prompts=True)
