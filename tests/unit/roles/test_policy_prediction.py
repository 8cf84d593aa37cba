"""`--mtp-train`, `--mtp-drafts`: the policy of a run stays the same to the bit, and the layer learns what follows."""

import functools
from pathlib import Path

import pytest
import torch

from megarl.checkpoint import folders
from tests.helpers.checkpoints import stored_weights
from tests.helpers.forked_programs import refusal
from tests.helpers.pages.combinations import RECURRENT
from tests.helpers.programs import GRADED, metrics, rl_argv, samples, sft_argv, timeless, train
from tests.helpers.tiers import by_default, long

STEPS = 4
GRPO = f"--advantage grpo {GRADED} --kl-coefficient 0 --lr 3e-3"
RUN = f"{GRPO} --train-iters {STEPS} --save-interval 2"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
RUNS = {  # ranks, flags
    "rl": (1, "--save-rollouts"),
    "recurrent": (1, RECURRENT),
    "several updates": (1, "--ppo-epochs 2 --minibatch-size 8 --critic-warmup-steps 1 --ema-decay 0.9"),
    "bf16": (1, "--bf16"),
    "fp16": (1, "--fp16 --initial-loss-scale 64"),
    "tensor": (2, "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer"),
    "context": (2, "--context-parallel-size 2"),
    "experts": (2, f"{EXPERTS} --moe-router-enable-expert-bias --moe-router-score-function sigmoid"
                   " --moe-router-load-balancing-type none --overlap-grad-reduce --use-distributed-optimizer"),
    "expert ranks": (2, f"{EXPERTS} --expert-model-parallel-size 2"),
    "offload": (2, "--actor-offload"),
    "other ranks": (2, "--role-map actor=0;reward=0;rollout=1 --verify-weights"),
    "generation ahead": (2, "--role-map actor=0;reward=1;rollout=1 --generation-lag 1 --rollout-correction tis"),
}  # fmt: skip


def argv(save: Path, flags: str) -> list[str]:
    own_shape = any(flag in flags for flag in ("--num-experts", "--linear-attention-freq"))
    return rl_argv(save, f"{RUN} --mtp-drafts {flags}", warm_start=not own_shape)


@functools.cache
def run_of(folder: Path, name: str) -> Path:
    size, flags = RUNS[name]
    save = folder / name.replace(" ", "-")
    train("rl", argv(save, f"{flags} --mtp-train"), size)
    return save


def without_drafts(row: dict) -> dict:
    """A step's metrics without times, and without those of drafts and of the layer."""
    return {name: value for name, value in timeless(row).items()
            if "mtp" not in name and "draft" not in name and "decode_steps" not in name
            and "accepted" not in name and "sync_bytes" not in name and "staged_bytes" not in name}  # fmt: skip


@pytest.mark.parametrize("name", by_default(RUNS, ("rl",)))
def test_the_policy_is_that_of_a_run_without_the_layer(name, folder, tmp_path):
    (size, flags), save = RUNS[name], run_of(folder, name)
    train("rl", [token for token in argv(tmp_path, flags) if token != "--mtp-drafts"], size)
    found, plain = metrics(save), metrics(tmp_path)
    for step in range(1, STEPS + 1):
        assert without_drafts(found[step]) == without_drafts(plain[step])
        assert samples(save, step) == samples(tmp_path, step)
    one, other = stored_weights(save, STEPS, "actor"), stored_weights(tmp_path, STEPS, "actor")
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    trained = [row for row in found.values() if "actor/mtp_loss" in row]
    assert len(trained) >= STEPS - 1 and all(row["actor/mtp_grad_norm"] > 0 for row in trained)
    if "--pretrained-checkpoint" in argv(save, flags):  # else the policy, and so what it writes, changes at random
        assert trained[-1]["actor/mtp_loss"] < trained[0]["actor/mtp_loss"]
    before, after = stored_weights(save, 2, "actor_mtp"), stored_weights(save, STEPS, "actor_mtp")
    assert any((before[key] != after[key]).any() for key in after) and after


# -- resume --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_layer_goes_on_in_16_bits(folder, tmp_path):
    start = folders.step_folder(run_of(folder, "rl"), 2)
    flags = f"--bf16 --use-distributed-optimizer --mtp-train --load {start} --train-iters 3 --lr-decay-iters {STEPS}"
    # A policy of 16 bits would write other texts.
    train("rl", argv(tmp_path / "on", f"{flags} --load-rollouts {run_of(folder, 'rl')} --debug-train-only"))
    expected, found = (metrics(run)[3]["actor/mtp_loss"] for run in (run_of(folder, "rl"), tmp_path / "on"))
    assert found == pytest.approx(expected, rel=2e-2)


def test_a_layer_may_begin_in_a_resumed_run(folder, tmp_path, capfd):
    flags = f"{GRPO} --save-interval 1"
    train("rl", rl_argv(tmp_path / "run", f"{flags} --train-iters 1 --lr-decay-iters 2"))
    argv = rl_argv(tmp_path / "on", f"{flags} --train-iters 2 --mtp-train --load {tmp_path / 'run'}")
    train("rl", argv)
    assert "has no trained layer of multi-token prediction (--mtp-train), which begins anew" in capfd.readouterr().err
    assert metrics(tmp_path / "on")[2]["actor/mtp_loss"] > 0 and stored_weights(tmp_path / "on", 2, "actor_mtp")


# -- supervised training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, flags", [(1, ""), long((2, "--context-parallel-size 2 --bf16"))])
def test_supervised_training_also_trains_it_and_a_rollout_begins_with_it(size, flags, tmp_path):
    sft = f"--train-iters 4 --save-interval 2 --lr-decay-iters 4 {flags}"
    train("sft", sft_argv(tmp_path / "plain", sft), size)
    train("sft", sft_argv(tmp_path / "run", f"{sft} --mtp-train"), size)
    found, plain = metrics(tmp_path / "run"), metrics(tmp_path / "plain")
    assert all(without_drafts(found[step]) == without_drafts(plain[step]) for step in plain)
    assert found[4]["actor/mtp_loss"] < found[1]["actor/mtp_loss"]
    start = folders.step_folder(tmp_path / "run", 2)
    train("sft", sft_argv(tmp_path / "on", f"{sft} --mtp-train --load {start}"), size)
    trained = stored_weights(tmp_path / "run", 4, "actor_mtp")
    again = stored_weights(tmp_path / "on", 4, "actor_mtp")
    assert all(torch.equal(trained[key], again[key]) for key in trained) and trained
    # The layer of a checkpoint drafts without training.
    rl = f"{GRPO} --mtp-drafts --train-iters 1 --pretrained-checkpoint {tmp_path / 'run'} {flags}"
    train("rl", rl_argv(tmp_path / "rl", rl, warm_start=False), size)
    kept = stored_weights(tmp_path / "rl", 1, "actor_mtp")
    assert all(torch.equal(trained[key], kept[key]) for key in trained)
    message = refusal(
        rl_argv(tmp_path / "x", rl.replace(str(tmp_path / "run"), str(tmp_path / "plain")), False), "rl", size=size
    )
    assert "has no actor_mtp.mtp.layers.0.eh_proj.weight, which actor needs" in message
