"""Schedules, the optimizer and frozen parameters on resume: those of the checkpoint, or a line that refuses others."""

import json
import re

import pytest

from megarl.checkpoint import resume, resumed_flags
from megarl.errors import UsageError
from tests.helpers.programs import program, reward_argv, rl_argv, sft_argv

ARGV = {"sft": sft_argv, "reward": reward_argv, "rl": rl_argv}
CONSTANT, LINEAR = "--lr 1e-2 --lr-decay-style constant", "--lr 1e-2 --lr-decay-style linear"
OVERRIDE, OLD = "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"


def resumed(folder, name: str, before: str, after: str):
    """(manifest of a run with the flags `before`, the configuration of one that resumes it with `after`)."""
    first, second = (program(name, ARGV[name](folder, flags), 1) for flags in (before, f"{after} --load {folder}"))
    return json.loads(json.dumps(resumed_flags.manifest_entries(first))), second


# Program, flags of the run, flags of its resume, what the message must name; None: accepted.
RESUMES = [
    ("sft", f"{CONSTANT} --train-iters 4", f"{CONSTANT} --train-iters 9", None),
    ("sft", CONSTANT, f"{CONSTANT} --min-lr 1e-3", None),
    ("sft", CONSTANT, "--lr 1e-3 --lr-decay-style constant", r"--lr 0.001 \(before: 0.01\): .* actor"),
    ("sft", CONSTANT, f"{CONSTANT} --decoupled-lr 1e-3", r"--decoupled-lr 0.001 \(before: not set\)"),
    ("reward", f"{CONSTANT} --lr-warmup-iters 1 --lr-warmup-init 0", f"{CONSTANT} --lr-warmup-iters 1",
     r"--lr-warmup-init not set \(before: 0.0\)"),
    ("sft", CONSTANT, f"{CONSTANT} --weight-decay 0.3", r"--weight-decay 0.3 \(before: 0.01\)"),
    ("rl", f"{CONSTANT} --lr-warmup-fraction 0.1 --train-iters 20",
     f"{CONSTANT} --lr-warmup-fraction 0.1 --train-iters 40", "--lr-decay-iters 40"),
    ("sft", f"{LINEAR} --train-iters 4", f"{LINEAR} --train-iters 9", r"--lr-decay-iters 9 \(before: 4\)"),
    ("sft", f"{LINEAR} --lr-decay-iters 9 --train-iters 4", f"{LINEAR} --train-iters 9", None),
    ("sft", LINEAR, f"{LINEAR} --min-lr 1e-3", r"--min-lr 0.001 \(before: 0.0\)"),
    ("sft", LINEAR, CONSTANT, r"--lr-decay-style constant \(before: linear\)"),
    ("sft", LINEAR, f"{LINEAR} --weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.1",
     r"--weight-decay-incr-style linear \(before: constant\)"),
    ("reward", CONSTANT, "--lr 1e-3 --lr-decay-style constant", "not the schedule of the reward"),
    ("rl", CONSTANT, f"{CONSTANT} --critic-lr 1e-3", "--lr 0.001 .* critic"),
    ("rl", LINEAR, f"{LINEAR} --ppo-epochs 3 --minibatch-size 1", None),  # other updates, the same steps
    ("rl", f"{LINEAR} --train-iters 2", f"{LINEAR} --train-iters 9 --debug-rollout-only", None),  # nothing is trained
]  # fmt: skip


@pytest.mark.parametrize("name, before, after, named", RESUMES)
def test_another_schedule_is_refused_unless_a_flag_says_which_counts(name, before, after, named, tmp_path):
    manifest, config = resumed(tmp_path, name, before, after)
    if named is None:
        resumed_flags.check(manifest, config)
    else:
        with pytest.raises(UsageError, match=f"{named}.*{OVERRIDE}.*{OLD}"):
            resumed_flags.check(manifest, config)
    for flag in (OVERRIDE, OLD):
        resumed_flags.check(*resumed(tmp_path, name, before, f"{after} {flag}"))


def test_the_flag_for_the_old_schedule_replaces_what_differs_and_names_it(tmp_path):
    before, after = f"{LINEAR} --train-iters 4 --min-lr 1e-3", f"--lr 5e-2 --weight-decay 0.3 --train-iters 9 {OLD}"
    manifest, config = resumed(tmp_path, "sft", before, after)
    (line,) = resumed_flags.adopt(manifest, config)
    for text in ("--lr 0.05 (before: 0.01)", "--lr-decay-iters 9 (before: 4)", "--weight-decay 0.3 (before: 0.01)"):
        assert text in line
    args = config.roles["actor"].megatron
    assert resumed_flags.schedule_flags(args) == manifest[resumed_flags.SCHEDULES]["actor"]
    assert (args.lr, args.min_lr, args.lr_decay_iters, args.train_iters) == (1e-2, 1e-3, 4, 9)
    assert resumed_flags.adopt(*resumed(tmp_path, "sft", before, f"{before} {OLD}")) == []
    assert resumed_flags.adopt(*resumed(tmp_path, "sft", before, f"{before} --lr 5e-2 {OVERRIDE}")) == []


# -- optimizer states --------------------------------------------------------------------------------------------

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


def test_other_multipliers_are_another_schedule(tmp_path):
    rates = "--lr-multipliers embedding.*=2 *.mlp.*=3"
    first, second = (program("sft", sft_argv(tmp_path, flags), 1) for flags in ("", f"{rates} --load {tmp_path}"))
    before = json.loads(json.dumps(resumed_flags.manifest_entries(first)))
    said = r"--lr-multipliers embedding.*=2 *.mlp.*=3 (before: not set): not the schedule of the actor"
    with pytest.raises(UsageError, match=re.escape(said)):
        resumed_flags.check(before, second)
    resumed_flags.check(json.loads(json.dumps(resumed_flags.manifest_entries(second))), second)
