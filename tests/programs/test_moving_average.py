"""`--ema-decay`: the moving average of the trained weights, in checkpoints, in evaluations and after a resume."""

import functools
import json
from pathlib import Path

import pytest
import torch

from megarl.checkpoint import folders
from tests.helpers.checkpoints import stored_weights
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.programs import (
    GRADED,
    SFT_STEPS,
    SHAPE,
    inputs,
    metrics,
    preference_argv,
    preferences,
    reward_argv,
    rl_argv,
    samples,
    sft_argv,
    timeless,
    train,
)
from tests.helpers.tiers import by_default
from tests.helpers.tools import converted
from tests.helpers.worlds import run_world

STEPS, DECAY = 4, 0.7
AVERAGE = f"--ema-decay {DECAY} --train-iters {STEPS} --save-interval 1 --lr 3e-3 --keep-best false"
GRPO = f"--advantage grpo {GRADED} --kl-coefficient 0"
APART = "--role-map actor=0;reward=0;rollout=1"
LORA = "--lora-rank 4 --lora-targets q_proj,up_proj"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-enable-expert-bias"
    " --moe-router-score-function sigmoid --moe-router-bias-update-rate 0.1 --moe-router-load-balancing-type none"
)
RUNS = {  # ranks, flags
    "rl": (1, ""),
    "bf16": (1, "--bf16"),
    "factors": (1, LORA),
    "bf16 factors": (2, f"{LORA} --bf16 {APART}"),
    "tensor": (2, "--tensor-model-parallel-size 2"),
    "stages": (2, "--pipeline-model-parallel-size 2"),
    "sharded": (2, "--use-torch-fsdp2"),
    "sharded factors": (2, f"{LORA} --use-torch-fsdp2"),
    "sharded optimizer": (2, "--use-distributed-optimizer --actor-offload"),
    "experts": (2, f"{EXPERTS} --expert-model-parallel-size 2"),
    "other ranks": (2, APART),
    "generation ahead": (2, "--role-map actor=0;reward=1;rollout=1 --generation-lag 1 --rollout-correction tis"
                         " --verify-weights"),
    "a schedule": (2, "--role-map actor=0;reward=1;rollout=1 --generation-lag 1 --rollout-correction tis"
                   " --generation-schedule recorded --rollout-prefix-caching"),
}  # fmt: skip


def argv(save: Path, flags: str, evaluation: str = "--evaluate-ema") -> list[str]:
    evaluation = (
        f"--eval-prompts {inputs() / 'heldout.jsonl'} --eval-interval 2 --eval-samples 8 {evaluation}"
        " --eval-responses 3 --eval-temperature 0.7"
    )
    return rl_argv(save, f"{GRPO} {AVERAGE} {evaluation} {flags}", warm_start="--num-experts" not in flags)


@functools.cache
def run_of(folder: Path, name: str) -> Path:
    size, flags = RUNS[name]
    save = folder / name.replace(" ", "-")
    train("rl", argv(save, flags), size)
    return save


@pytest.mark.parametrize("name", by_default(RUNS, ("rl",)))
def test_the_average_is_that_of_the_weights_of_each_step(name, folder):
    """Against float64, from the first checkpoint on."""
    save = run_of(folder, name)
    average = {key: value.double() for key, value in stored_weights(save, 1, "actor_ema").items()}
    if name == "rl":  # whose start is known
        start, first = stored_weights(inputs() / "sft", SFT_STEPS, "actor"), stored_weights(save, 1, "actor")
        for key, value in start.items():
            expected = DECAY * value.double() + (1 - DECAY) * first[key].double()
            assert (average[key] - expected).abs().max() <= 2e-6 and (value != first[key]).any()
    moved = 0
    for step in range(2, STEPS + 1):
        weights, found = stored_weights(save, step, "actor"), stored_weights(save, step, "actor_ema")
        assert found.keys() == weights.keys() == average.keys()
        for key, value in weights.items():
            average[key] = DECAY * average[key] + (1 - DECAY) * value.double()
            if key.endswith((".expert_bias", ".expert_share")):
                average[key] = value.double()
            else:
                assert found[key].dtype == torch.float32
                moved += int((found[key] != value).any())
            assert (found[key] - average[key]).abs().max() <= 2e-6 * max(float(value.abs().max()), 1e-3), (step, key)
    assert moved > 0


# -- evaluation ----------------------------------------------------------------------------------------------------


def parts(row: dict) -> tuple[dict, dict]:
    """(metrics of the evaluation, all others) of a step, without times."""
    found = timeless(row)
    evaluated = {name: value for name, value in found.items() if name.startswith("eval/")}
    return evaluated, {name: value for name, value in found.items() if name not in evaluated}


PLACES = ("rl", "other ranks", "bf16 factors", "generation ahead", "a schedule", "factors", "sharded", "tensor")


@pytest.mark.parametrize("name", by_default(PLACES, ("other ranks",)))
def test_an_evaluation_of_the_average_changes_no_byte_of_the_training(name, folder, tmp_path):
    (size, flags), save = RUNS[name], run_of(folder, name)
    schedule = f" --replay-schedule {save}" if name == "a schedule" else ""
    if schedule:
        flags = flags.replace("--generation-schedule recorded", schedule)
    train("rl", argv(tmp_path, flags, ""), size)
    found, plain = metrics(save), metrics(tmp_path)
    for step in range(1, STEPS + 1):
        (evaluated, rest), (of_weights, expected) = parts(found[step]), parts(plain[step])
        assert rest == expected and samples(save, step) == samples(tmp_path, step)
        assert bool(evaluated) == (step % 2 == 0) and (evaluated != of_weights) == (step % 2 == 0)
    one, other = stored_weights(save, STEPS, "actor"), stored_weights(tmp_path, STEPS, "actor")
    assert all(torch.equal(one[key], other[key]) for key in one | other)


def average_of(save: Path, step: int, new: Path, flags: str = "", head: str = "") -> Path:
    """A run folder with the average of a step's checkpoint."""
    files = "--load", folders.step_folder(save, step), "--save", new
    assert run_world(converted, 1, "average", *head.split(), *files, *SHAPE.split(), *flags.split()) == [0]
    return new


EXPORTS = {"rl": "", "factors": "", "tensor": "", "bf16 factors": "--bf16"}


@pytest.mark.parametrize("name", by_default(EXPORTS, ("factors",)))
def test_the_exported_average_evaluates_to_the_same(name, folder, tmp_path):
    """In the run's precision, on one rank."""
    save = run_of(folder, name)
    new = average_of(save, STEPS, tmp_path / "average", EXPORTS[name])
    flags = f"{GRADED} --eval-samples 8 --eval-responses 3 --eval-temperature 0.7 {EXPORTS[name]}"
    run_evaluate(evaluate_argv(tmp_path / "evaluation", flags, load=new))
    found = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())["metrics"]
    evaluated, _ = parts(metrics(save)[STEPS])
    assert found == evaluated and found["eval/reward"] != 0


SUPERVISED = {
    "sft": (sft_argv, lambda: inputs() / "heldout.jsonl", ""),
    "reward": (reward_argv, lambda: preferences() / "heldout-preferences.jsonl", "--reward"),
    "preference": (preference_argv, lambda: preferences() / "heldout-preferences.jsonl", ""),
}


@pytest.mark.parametrize("name", by_default(SUPERVISED, ("sft",)))
def test_supervised_training_keeps_and_evaluates_an_average(name, tmp_path):
    argv, held_out, head = SUPERVISED[name]
    evaluation = f"--eval-prompts {held_out()} --eval-interval 1 --eval-samples 9 --keep-best false"
    train(name, argv(tmp_path / "run", f"{evaluation} --train-iters 4 --ema-decay 0.5 --evaluate-ema"))
    train(name, argv(tmp_path / "plain", f"{evaluation} --train-iters 4"))
    found, plain = metrics(tmp_path / "run")[4], metrics(tmp_path / "plain")[4]
    assert found[f"{name}/loss"] == plain[f"{name}/loss"] and found["eval/loss"] != plain["eval/loss"]
    if name == "preference":  # a run from the average would have another reference
        return
    new = average_of(tmp_path / "run", 4, tmp_path / "average", head=head)
    start = f"--train-iters 1 --lr 0 --lr-warmup-iters 0 --pretrained-checkpoint {new}"
    train(name, argv(tmp_path / "apart", f"{evaluation} {start}"))
    assert metrics(tmp_path / "apart")[1]["eval/loss"] == found["eval/loss"]


# -- resume --------------------------------------------------------------------------------------------------------


def test_an_average_may_begin_in_a_resumed_run(tmp_path, capfd):
    flags = f"{GRPO} --train-iters 3 --save-interval 1"
    train("rl", rl_argv(tmp_path / "run", flags))
    start = folders.step_folder(tmp_path / "run", 2)
    assert "moving average" not in capfd.readouterr().err
    train("rl", rl_argv(tmp_path / "on", f"{flags} --ema-decay {DECAY} --load {start}"))
    assert "has no moving average (--ema-decay), which begins with the weights of this step" in capfd.readouterr().err
    before, after, found = (
        stored_weights(tmp_path / run, step, role)
        for run, step, role in (("run", 2, "actor"), ("run", 3, "actor"), ("on", 3, "actor_ema"))
    )
    for key, value in found.items():
        expected = DECAY * before[key].double() + (1 - DECAY) * after[key].double()
        assert (value - expected).abs().max() <= 2e-6, key
    assert found and any((found[key] != after[key]).any() for key in found)
    status = run_world(converted, 1, "average", "--load", tmp_path / "run", "--save", tmp_path / "x", *SHAPE.split())
    assert status == [2] and "has no moving average; its run needs --ema-decay" in capfd.readouterr().err
