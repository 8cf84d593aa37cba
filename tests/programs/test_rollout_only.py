"""`--debug-rollout-only`: the responses and rewards of a training run, without anything of training."""

import json
from pathlib import Path

import pytest

from tests.helpers.forked_programs import check
from tests.helpers.programs import GRADED, inputs, metrics, program, rl_argv, samples, timeless, train
from tests.helpers.worlds import run_world

STEPS = f"--train-iters 3 --save-interval 1 --lr-decay-iters 9 {GRADED}"
ONLY = "--debug-rollout-only"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A PPO run that keeps its rollouts."""
    save = tmp_path_factory.mktemp("trained") / "run"
    train("rl", rl_argv(save, f"{STEPS} --save-rollouts"))
    return save


def responses(run: Path, step: int) -> list[str]:
    return [json.loads(line)["response"] for line in samples(run, step).splitlines()]


@pytest.mark.long
def test_the_next_step_of_a_run_is_generated_again_and_can_be_trained_on(trained, tmp_path):
    """Step 2 from the checkpoint of step 1, on two ranks; step 3 then comes from the same policy."""
    again, repeated, start = tmp_path / "again", tmp_path / "repeated", trained / "checkpoints" / "step_00000001"
    layout = "--role-map actor=0;reward=1;rollout=1"
    train("rl", rl_argv(again, f"{STEPS} {ONLY} --save-rollouts --load {start} {layout}"), 2)
    assert samples(again, 2) == samples(trained, 2) and responses(again, 3) != responses(trained, 3)
    before, after = metrics(trained)[2], metrics(again)[2]
    for name in ("reward/mean", "reward/std", "reward/accuracy", "rollout/finished_fraction", "rollout/tokens"):
        assert after[name] == pytest.approx(before[name], rel=1e-12), name
    assert {name.split("/")[0] for name in timeless(after)} == {"step", "reward", "rollout", "perf", "steps_skipped"}
    assert not (again / "checkpoints").exists()
    train("rl", rl_argv(repeated, f"{STEPS} --debug-train-only --load-rollouts {again} --load {start}"))
    found, expected = timeless(metrics(repeated)[2]), timeless(before)
    assert {n: v for n, v in found.items() if not n.startswith("weights/")} == {
        name: value for name, value in expected.items() if not name.startswith("weights/")
    }


def memory_of(rank: int, parsed) -> dict:
    """Roles and tensors that a run has built."""
    from megarl.observe.timers import Timers
    from megarl.trainers.rl_trainer import RLTrainer

    run = RLTrainer(parsed, Timers())
    parameters = list(run.rollout.model[0].parameters())
    return {
        "roles": sorted(run.mesh.roles),
        "trained": [run.actor.trainable_model, run.critic.trainable_model],
        "gradients": [p for p in parameters if p.grad is not None or hasattr(p, "main_grad")],
    }


def test_no_critic_reference_optimizer_or_gradient_exists(tmp_path):
    (found,) = run_world(memory_of, 1, program("rl", rl_argv(tmp_path, f"--train-iters 1 {ONLY}"), 1))
    assert found == {"roles": ["actor", "reward", "rollout"], "trained": [None, None], "gradients": []}


def refused(save: Path, flags: str, warm_start: bool = True) -> str:
    """The error; a warning of flags without effect may come before it."""
    status, _, printed = check(rl_argv(save, f"{STEPS} {ONLY} {flags}", warm_start), size=2)
    assert status == 2
    return printed.splitlines()[-1].removeprefix("megarl: error: ")


def test_what_is_refused(trained, tmp_path):
    needs = "--debug-rollout-only: needs weights to generate with, in --load, --pretrained-checkpoint or --hf-model"
    assert refused(tmp_path, "", warm_start=False) == needs
    line = f"--save {trained}: is the run of --load; give a debug run another folder"
    assert refused(trained, f"--load {trained}/checkpoints/step_00000001") == line
    line = refused(tmp_path, "--role-map actor=0;critic=1;reward=1")
    assert line.endswith("'critic' has nothing to do: --debug-rollout-only trains nothing; leave it out")


def test_evaluation_is_left_out_with_a_warning(tmp_path):
    flags = f"{ONLY} --eval-prompts {inputs()}/heldout.jsonl --eval-interval 1"
    (warning,) = program("rl", rl_argv(tmp_path, flags), 1).warnings
    assert "--eval-prompts, --eval-interval (--debug-train-only and --debug-rollout-only evaluate nothing)" in warning
