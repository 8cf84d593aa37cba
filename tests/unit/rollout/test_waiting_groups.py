"""Groups that wait in a checkpoint: which runs can continue them, by the manifest alone."""

import json
import re

import pytest

from megarl.errors import UsageError
from megarl.rollout import waiting_groups
from megarl.rollout.response_log import Record
from megarl.rollout.waiting_groups import BATCH, GROUPS, kept_records
from tests.helpers.programs import program, rl_argv

SIX = "--advantage grpo --prompts-per-step 6 --samples-per-prompt 2"
FILTER = "--group-filter reward --dynamic-sampling"
PARTIAL = "--partial-rollouts --over-sampling 1.5 --rollout-correction tis"
TURNS = "--environment x:y"
APART = "--role-map actor=0;reward=0;reference=0;rollout=1"
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
    (f"{SIX} {PARTIAL} {TURNS}", 0, 4, f"{SIX} {PARTIAL} {TURNS}", None),
    (f"{SIX} {PARTIAL} {TURNS}", 0, 4, f"{SIX} {PARTIAL}", "that were generated with --environment; resume like that"),
    (f"{SIX} {PARTIAL} {TURNS}", 0, 4, f"{SIX} {PARTIAL} --environment x:z",
     "--environment x:z: the checkpoint of --load"),
    (f"{SIX} {FILTER} {TURNS}", 3, 0, f"{SIX} {FILTER} --environment x:z", None),
    (f"{SIX} {PARTIAL}", 0, 4, f"{SIX} {PARTIAL} {TURNS}", "that were generated without --environment; resume"),
]  # fmt: skip


@pytest.mark.parametrize("before, complete, unfinished, after, says", RESUMES)
def test_which_runs_continue_the_groups_of_a_checkpoint(before, complete, unfinished, after, says, tmp_path):
    first, present = settings(tmp_path, before), settings(tmp_path, after)
    entry = {"step": 4, **waiting_groups.manifest_entry(first, complete, unfinished)}
    entry["settings"] = {"--environment": first.environment}
    manifest = json.loads(json.dumps(entry))
    if says is None:
        waiting_groups.check(manifest, present, has_new_prompts=False)
    else:
        with pytest.raises(UsageError) as caught:
            waiting_groups.check(manifest, present, has_new_prompts=False)
        assert says in str(caught.value) and "\n" not in str(caught.value)
    if complete or unfinished:
        with pytest.raises(UsageError, match="--load-changed-data: .* responses to the old prompts"):
            waiting_groups.check(manifest, settings(tmp_path, before), has_new_prompts=True)


LAG = "--rollout-correction tis --generation-lag"
QUEUES = {  # the queue of a checkpoint of step 4, flags of the resume, what the message says; None: accepted
    "the same lag": ({"lag": 2, "through": 6, "steps": [5, 6]}, f"{SIX} {LAG} 2", None),
    "another batch size": ({"lag": 2, "through": 6, "steps": [5, 6]}, f"{SIX} {LAG} 2 --prompts-per-step 4", None),
    "another lag": ({"lag": 2, "through": 6, "steps": [5]}, f"{SIX} {LAG} 1", "--generation-lag 1: the checkpoint of "),
    "a lag without batches": ({"lag": 2, "through": 6, "steps": []}, SIX, "--generation-lag 0: the checkpoint of "),
    "an empty queue": ({"lag": 2, "through": 4, "steps": []}, SIX, None),
    "another group size": ({"lag": 1, "through": 5, "steps": [5]}, f"{SIX} {LAG} 1 --samples-per-prompt 4", OTHER),
}


@pytest.mark.parametrize("case", QUEUES)
def test_which_runs_continue_with_batches_that_were_generated_ahead(case, tmp_path):
    queue, flags, says = QUEUES[case]
    entry = waiting_groups.manifest_entry(settings(tmp_path, SIX), 0, 0)
    manifest, present = {"step": 4, "generated_ahead": queue, **entry}, settings(tmp_path, flags)
    if says is None:
        waiting_groups.check(manifest, present, has_new_prompts=False)
    else:
        with pytest.raises(UsageError, match=re.escape(says)):
            waiting_groups.check(manifest, present, has_new_prompts=False)
    if queue["steps"]:
        with pytest.raises(UsageError, match="--load-changed-data|--generation-lag"):
            waiting_groups.check(manifest, present, has_new_prompts=True)


def test_a_checkpoint_that_says_nothing_of_groups_is_not_compared(tmp_path):
    waiting_groups.check({}, settings(tmp_path, SIX), has_new_prompts=True)


def test_records_of_all_replicas_are_read_by_their_kind(tmp_path):
    kept = kept_records(tmp_path)
    assert not kept.entries(GROUPS) and not list(kept.read(GROUPS))
    for dp_rank in (0, 2, 1):
        records = [(GROUPS, None), (BATCH, 4), (BATCH, 5 + dp_rank)]
        data = [waiting_groups.packed(kind, Record({"rank": dp_rank}, {}), step) for kind, step in records]
        (tmp_path / f"rollout_{dp_rank:05d}.log").write_bytes(b"".join(data))
    kept = kept_records(tmp_path)
    for of_kind, ranks in (((GROUPS,), [0, 1, 2]), ((BATCH, 4), [0, 1, 2]), ((BATCH, 6), [1]), ((BATCH, 9), [])):
        assert [record.facts["rank"] for record in kept.read(*of_kind)] == ranks
        assert bool(kept.entries(*of_kind)) == bool(ranks)
    path = tmp_path / "rollout_00002.log"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UsageError, match=f"^--load {path}: is damaged"):
        kept_records(tmp_path)
