"""Schedules, the optimizer and frozen parameters on resume: those of the checkpoint, or a line that refuses others."""

import json
import re
from pathlib import Path

import pytest
import torch

from megarl.checkpoint import resume
from megarl.errors import UsageError
from tests.helpers.models.tiny_models import whole_tensor
from tests.helpers.programs import inputs, program, reward_argv, rl_argv, sft_argv
from tests.helpers.tiers import long
from tests.helpers.worlds import SAFETY, run_world

ARGV = {"sft": sft_argv, "reward": reward_argv, "rl": rl_argv}
CONSTANT, LINEAR = "--lr 1e-2 --lr-decay-style constant", "--lr 1e-2 --lr-decay-style linear"
OVERRIDE, OLD = "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"


def resumed(folder, name: str, before: str, after: str):
    """(manifest of a run with the flags `before`, the configuration of one that resumes it with `after`)."""
    first, second = (program(name, ARGV[name](folder, flags), 1) for flags in (before, f"{after} --load {folder}"))
    return json.loads(json.dumps(resume.manifest_entries(first))), second


# Program, flags of the run, flags of its resume, what the message must name; None: accepted.
RESUMES = [
    ("sft", f"{CONSTANT} --train-iters 4", f"{CONSTANT} --train-iters 9", None),
    ("sft", CONSTANT, f"{CONSTANT} --min-lr 1e-3", None),
    ("sft", CONSTANT, "--lr 1e-3 --lr-decay-style constant", r"--lr 0.001 \(before: 0.01\): .* actor"),
    ("sft", CONSTANT, f"{CONSTANT} --decoupled-lr 1e-3", r"--decoupled-lr 0.001 \(before: none\)"),
    ("reward", f"{CONSTANT} --lr-warmup-iters 1 --lr-warmup-init 0", f"{CONSTANT} --lr-warmup-iters 1",
     r"--lr-warmup-init none \(before: 0.0\)"),
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
        resume.check_schedules(manifest, config)
    else:
        with pytest.raises(UsageError, match=f"{named}.*{OVERRIDE}.*{OLD}"):
            resume.check_schedules(manifest, config)
    for flag in (OVERRIDE, OLD):
        resume.check_schedules(*resumed(tmp_path, name, before, f"{after} {flag}"))


def test_the_flag_for_the_old_schedule_replaces_what_differs_and_names_it(tmp_path):
    before, after = f"{LINEAR} --train-iters 4 --min-lr 1e-3", f"--lr 5e-2 --weight-decay 0.3 --train-iters 9 {OLD}"
    manifest, config = resumed(tmp_path, "sft", before, after)
    (line,) = resume.adopt_schedules(manifest, config)
    for text in ("--lr 0.05 (before: 0.01)", "--lr-decay-iters 9 (before: 4)", "--weight-decay 0.3 (before: 0.01)"):
        assert text in line
    args = config.roles["actor"].megatron
    assert resume.schedule_flags(args) == manifest[resume.SCHEDULES]["actor"]
    assert (args.lr, args.min_lr, args.lr_decay_iters, args.train_iters) == (1e-2, 1e-3, 4, 9)
    assert resume.adopt_schedules(*resumed(tmp_path, "sft", before, f"{before} {OLD}")) == []
    assert resume.adopt_schedules(*resumed(tmp_path, "sft", before, f"{before} --lr 5e-2 {OVERRIDE}")) == []


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
        resume.check_schedules(*resumed(tmp_path, name, before, after))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name, before, after", ACCEPTED)
def test_the_same_states_are_accepted(name, before, after, tmp_path):
    resume.check_schedules(*resumed(tmp_path, name, before, after))


def test_moments_of_another_type_are_a_changed_setting(tmp_path):
    small = "--use-precision-aware-optimizer --exp-avg-dtype bf16"
    before, after = (program("sft", sft_argv(tmp_path, flags), 1) for flags in ("", small))
    stored = {resume.SETTINGS: json.loads(json.dumps(resume.settings_entry(before)))}
    changed = resume.changed_settings(stored, resume.settings_entry(after))
    assert changed == "--actor-exp-avg-dtype bf16 (before: fp32)"
    resume.check_schedules(resume.manifest_entries(before), after)


def test_other_multipliers_are_another_schedule(tmp_path):
    rates = "--lr-multipliers embedding.*=2 *.mlp.*=3"
    first, second = (program("sft", sft_argv(tmp_path, flags), 1) for flags in ("", f"{rates} --load {tmp_path}"))
    before = json.loads(json.dumps(resume.manifest_entries(first)))
    said = r"--lr-multipliers embedding.*=2 *.mlp.*=3 (before: none): not the schedule of the actor"
    with pytest.raises(UsageError, match=re.escape(said)):
        resume.check_schedules(before, second)
    resume.check_schedules(json.loads(json.dumps(resume.manifest_entries(second))), second)


VOCAB = 16
TP2 = "--tensor-model-parallel-size 2"
DISTRIBUTED = "--use-distributed-optimizer"


def trainable_models(parsed, names=("actor",)):
    """(mesh, {role: trainable model on this rank}) of a parsed command line."""
    from megarl.comm import role_mesh
    from megarl.roles.trainable_model import TrainableModel

    here = role_mesh.create_mesh(parsed.roles, SAFETY)
    return here, {
        name: TrainableModel(parsed.roles[name], here[name], VOCAB, updates=2, value_head=name == "critic")
        for name in names
        if here[name].is_member
    }


def learn(trainable_model, updates: int):
    """Updates with gradients that follow from weights and step alone, whatever the layout."""
    from megarl.mcore.training import optimizer

    for _ in range(updates):
        trainable_model.wrapped[0].zero_grad_buffer()
        for number, (name, parameter) in enumerate(trainable_model.model[0].named_parameters()):
            parameter.main_grad.copy_(
                parameter.detach() * (1 + number % 3) + 0.01 * trainable_model.scheduler.num_steps
            )
        assert optimizer.update(trainable_model.optimizer)[0]
        trainable_model.scheduler.step(1)


def counters(trainable_model) -> set[int]:
    """Updates so far, by the optimizers' counters."""
    parts = trainable_model.optimizer.chained_optimizers
    return {group.get("step", 0) for part in parts for group in part.optimizer.param_groups}


def contents(trainable_model) -> dict:
    """Everything that a checkpoint must restore, gathered; moments only if they are not sharded."""
    group, plain = trainable_model.role_groups.pg_collection.tp, {}
    found = {
        name: whole_tensor(name, p, p.detach(), group, True) for name, p in trainable_model.model[0].named_parameters()
    }
    (part,) = trainable_model.optimizer.chained_optimizers
    for name, parameter in trainable_model.model[0].named_parameters():
        for moment, value in part.optimizer.state.get(parameter, {}).items():
            found[f"{name}/{moment}"] = whole_tensor(name, parameter, value, group, True)
    plain["steps"] = counters(trainable_model)
    plain["rate"] = trainable_model.learning_rate()
    return {"tensors": found, "plain": plain}


def save(rank: int, parsed, run: Path, updates: int, load: Path | None = None, names=("actor",)) -> dict:
    """Loads (or not), trains, saves; returns the contents by role before and after the updates."""
    from megarl.arguments import Settings
    from megarl.checkpoint import folders, resume
    from megarl.checkpoint.writer import CheckpointWriter

    here, found = trainable_models(parsed, names)
    extra = {"counter": [1, {"of": "the caller"}]}
    if load:
        loaded = resume.load_states(load, here, {name: one.state(extra, loading=True) for name, one in found.items()})
        assert all(one.restore(loaded[name]) == extra for name, one in found.items())
        for one in found.values():
            one.scheduler.step(max(counters(one)))  # a run does this at the start of a step
    before = {name: contents(one) for name, one in found.items()}
    for one in found.values():
        learn(one, updates)
    states = {name: one.state(extra) for name, one in found.items()}
    CheckpointWriter(run, here, Settings()).save(7, states, {"program": "test"})
    assert folders.find(str(run), "--load") == folders.step_folder(run, 7)
    return {"before": before, "after": {name: contents(one) for name, one in found.items()}}


def assert_equal(found: dict, expected: dict):
    assert found["plain"] == expected["plain"]
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        assert torch.equal(found["tensors"][name], tensor), name


def checkpoint_of(folder: Path) -> Path:
    return folder / "checkpoints" / "step_00000007"


def sft(folder: Path, flags: str = "", size: int = 1):
    return program("sft", sft_argv(folder, f"--lr 1e-2 --weight-decay 0.1 --train-iters 9 {flags}"), size)


# -- layouts -----------------------------------------------------------------------------------------------------


def restored_groups(rank: int, parsed, load: Path) -> list[dict]:
    """The param groups of an actor with the state of a checkpoint, in the fourth step of a run."""
    from megarl.checkpoint import resume

    here, found = trainable_models(parsed, ("actor",))
    loaded = resume.load_states(load, here, {"actor": found["actor"].state({}, loading=True)})
    found["actor"].restore(loaded["actor"])
    found["actor"].begin_step(4)
    parts = found["actor"].optimizer.chained_optimizers
    return [
        {k: v for k, v in group.items() if k != "params"} for part in parts for group in part.optimizer.param_groups
    ]


@pytest.mark.parametrize("flags", ["", long(DISTRIBUTED)])
def test_rates_and_adams_numbers_are_those_of_the_flags_whatever_the_checkpoint_had(flags, tmp_path):
    run_world(save, 1, sft(tmp_path / "a", flags), tmp_path / "a", 3)
    other = "--lr 4e-2 --min-lr 2e-2 --decoupled-lr 2e-3 --decoupled-min-lr 2e-3 --weight-decay 0.7 --adam-beta2 0.9"
    parsed = sft(tmp_path / "b", f"{flags} {other} --adam-eps 1e-5 --lr-decay-style linear --lr-decay-iters 4")
    (groups,) = run_world(restored_groups, 1, parsed, checkpoint_of(tmp_path / "a"))
    assert {group["lr"] for group in groups} == {
        3e-2,
        2e-3,
    }  # halfway after the warm-up, and constant for embedding and head
    assert {group["weight_decay"] for group in groups} == {0.7, 0.0}
    assert {(group["betas"][1], group["eps"], group["step"]) for group in groups} == {(0.9, 1e-5, 3)}


# -- roles -------------------------------------------------------------------------------------------------------


def test_roles_on_disjoint_ranks_come_back_on_one_rank(tmp_path):
    apart, together, names = tmp_path / "apart", tmp_path / "together", ("actor", "critic")
    role_map = "--role-map actor=1-2;critic=0;reward=0;reference=0 --actor-tensor-model-parallel-size 2"
    parsed = program("rl", rl_argv(apart, role_map), 3)
    critic, actor, same_actor = [r["after"] for r in run_world(save, 3, parsed, apart, 2, None, names)]
    assert list(critic) == ["critic"] and list(actor) == list(same_actor) == ["actor"]
    parsed = program("rl", rl_argv(together), 1)
    found = run_world(save, 1, parsed, together, 0, checkpoint_of(apart), names)[0]["before"]
    assert_equal(found["actor"], actor["actor"])
    assert_equal(found["critic"], critic["critic"])


def warm_started(rank: int, parsed):
    """(weights of actor and critic after a warm start from the policy, which keeps the critic's head)."""
    from megarl.checkpoint import folders, pretrained

    here, found = trainable_models(parsed, ("actor", "critic"))
    head = found["critic"].model[0].output_layer
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, 32))
        head.bias.fill_(0.25)
    for name, trainable_model in found.items():
        pretrained.load_weights(
            folders.find(str(inputs() / "sft"), "--x"), trainable_model.model, here[name].pg_collection
        )
    return [
        {key: tensor for key, tensor in contents(found[name])["tensors"].items() if "/exp_avg" not in key}
        for name in ("actor", "critic")
    ]


@pytest.mark.parametrize("size, flags", [(1, ""), (2, TP2)])
def test_the_critic_keeps_its_head_when_it_loads_the_policys_weights(size, flags, tmp_path):
    parsed = program("rl", rl_argv(tmp_path, flags), size)
    for actor, critic in run_world(warm_started, size, parsed):
        assert torch.equal(critic.pop("output_layer.weight"), torch.linspace(-1, 1, 32).unsqueeze(0))
        assert float(critic.pop("output_layer.bias")) == 0.25
        assert set(critic) == set(actor)
        assert all(torch.equal(critic[name], actor[name]) for name in critic)
    trained = run_world(warm_started, 1, program("rl", rl_argv(tmp_path), 1))[0][0]
    assert all(torch.equal(trained[name], actor[name]) for name in trained)


# -- folders -----------------------------------------------------------------------------------------------------


def test_manifest_and_latest_name_the_step(tmp_path):
    run_world(save, 1, sft(tmp_path), tmp_path, 0)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000007\n"
    manifest = json.loads((checkpoint_of(tmp_path) / "manifest.json").read_text())
    assert {"step": 7, "world_size": 1, "program": "test", "format": 3}.items() <= manifest.items()
    assert manifest["files"].keys() == {".metadata", "__0_0.distcp", "metadata.json"}
    assert manifest["versions"].keys() == {"megarl", "megatron-core", "torch", "transformers"}
