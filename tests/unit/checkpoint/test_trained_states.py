"""A run resumes with the optimizer and the frozen parameters of its checkpoint, or is refused in one line."""

import json
import re

import pytest

from megarl.checkpoint import resume, resumed_flags
from megarl.errors import UsageError
from tests.helpers.programs import program, rl_argv, sft_argv

FREEZE = "--freeze embedding.*"
REFUSED = [  # program, flags of the run, flags of its resume, what the message says
    ("sft", "", "--optimizer sgd", "--optimizer sgd: the actor in the checkpoint of --load "),
    ("sft", "--optimizer sgd", "", "has optimizer states of --optimizer sgd; --pretrained-checkpoint starts a new run"),
    ("sft", "--optimizer sgd", "--optimizer sgd --sgd-momentum 0", "states of --sgd-momentum above 0"),
    ("sft", "", FREEZE, "--freeze embedding.*: the actor in the checkpoint"),
    ("sft", FREEZE, "", "--freeze (none): the actor in the checkpoint"),
    ("sft", FREEZE, f"{FREEZE} --bf16", "--bf16 on: the actor in the checkpoint"),
    ("sft", FREEZE, f"{FREEZE} --use-distributed-optimizer", "states of --use-distributed-optimizer off"),
    ("rl", "", "--critic-optimizer sgd", "--optimizer sgd: the critic in the checkpoint"),
]  # fmt: skip
ACCEPTED = [
    ("sft", "", "--bf16 --use-distributed-optimizer"),
    ("sft", f"{FREEZE} *.layers.0.*", "--freeze *.layers.0.* embedding.*"),
    ("sft", "--optimizer sgd", "--optimizer sgd --sgd-momentum 0.5"),
    ("rl", "--optimizer sgd", "--optimizer sgd --debug-rollout-only"),  # nothing is trained
]


def resumed(folder, name: str, before: str, after: str):
    """(manifest of a run with the flags `before`, the configuration of one that resumes it with `after`)."""
    argv = {"sft": sft_argv, "rl": rl_argv}[name]
    first, second = (program(name, argv(folder, flags), 1) for flags in (before, f"{after} --load {folder}"))
    return json.loads(json.dumps(resumed_flags.manifest_entries(first))), second


@pytest.mark.parametrize("name, before, after, says", REFUSED)
def test_other_states_are_refused(name, before, after, says, tmp_path):
    with pytest.raises(UsageError, match=re.escape(says)) as found:
        resumed_flags.check(*resumed(tmp_path, name, before, after))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name, before, after", ACCEPTED)
def test_the_same_states_are_accepted(name, before, after, tmp_path):
    resumed_flags.check(*resumed(tmp_path, name, before, after))


def test_moments_of_another_type_are_a_changed_setting(tmp_path):
    small = "--use-precision-aware-optimizer --exp-avg-dtype bf16"
    before, after = (program("sft", sft_argv(tmp_path, flags), 1) for flags in ("", small))
    stored = {resume.SETTINGS: json.loads(json.dumps(resume.settings_entry(before)))}
    changed = resume.changed_settings(stored, resume.settings_entry(after))
    assert changed == "--actor-exp-avg-dtype bf16 (before: fp32)"
    resumed_flags.check(resumed_flags.manifest_entries(before), after)


def test_a_checkpoint_without_the_entry_is_of_adam(tmp_path):
    resumed_flags.check({}, program("sft", sft_argv(tmp_path, ""), 1))
    with pytest.raises(UsageError, match="states of --optimizer adam"):
        resumed_flags.check({}, program("sft", sft_argv(tmp_path, f"--optimizer sgd --load {tmp_path}"), 1))


def test_other_multipliers_are_another_schedule(tmp_path):
    rates = "--lr-multipliers embedding.*=2 *.mlp.*=3"
    first, second = (program("sft", sft_argv(tmp_path, flags), 1) for flags in ("", f"{rates} --load {tmp_path}"))
    before = json.loads(json.dumps(resumed_flags.manifest_entries(first)))
    said = r"--lr-multipliers embedding.*=2 *.mlp.*=3 (before: not set): not the schedule of the actor"
    with pytest.raises(UsageError, match=re.escape(said)):
        resumed_flags.check(before, second)
    resumed_flags.check(json.loads(json.dumps(resumed_flags.manifest_entries(second))), second)
    for role in before[resumed_flags.SCHEDULES].values():  # of a version without the flags
        del role["lr_multipliers"], role["weight_decay_multipliers"]
    with pytest.raises(UsageError, match=re.escape(said)):
        resumed_flags.check(before, second)
