"""Optimizers other than Adam, frozen parameters and own rates in whole runs: metrics, checkpoints, resumes."""

import fnmatch
import importlib.util

import pytest
import torch

from megarl.checkpoint import folders
from tests.helpers.checkpoints import stored_weights
from tests.helpers.forked_programs import accepted, refusal
from tests.helpers.programs import metrics, preference_argv, reward_argv, rl_argv, sft_argv, train
from tests.helpers.tiers import long

FROZEN = ("embedding.*", "*.layers.0.*")
RATES = "--lr-multipliers *.mlp.*=0.5 --weight-decay-multipliers *.mlp.*=3"
STEPS = "--train-iters 3 --save-interval 1 --lr-warmup-iters 0"
SMALL = "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
ARGV = {"sft": sft_argv, "rl": rl_argv, "reward": reward_argv, "preference": preference_argv}
needs_muon = pytest.mark.skipif(
    importlib.util.find_spec("emerging_optimizers") is None,
    reason="emerging-optimizers is not installed: pip install 'megarl[optimizers]'",
)
MUON_RUNS = [
    ("rl", 1, f"--optimizer muon --critic-optimizer adam --freeze {' '.join(FROZEN)} --ema-decay 0.5 --offload"),
    ("sft", 2, "--optimizer dist_muon --bf16"),
    ("rl", 2, "--optimizer muon --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --mtp-train --mtp-drafts"
     " --expert-model-parallel-size 2 --use-distributed-optimizer"
     " --moe-router-enable-expert-bias --moe-router-score-function sigmoid"),
]  # fmt: skip
RUNS = [  # program, ranks, flags
    ("rl", 1, f"--freeze {' '.join(FROZEN)} {RATES} --critic-optimizer sgd --critic-lr 0.1 --ema-decay 0.5"),
    long(("sft", 1, f"--optimizer sgd --lr 0.1 {RATES}")),
    long(("sft", 2, f"--freeze {' '.join(FROZEN)} --optimizer sgd --bf16 --lr 0.1 --use-distributed-optimizer")),
    long(("reward", 2, f"--freeze {' '.join(FROZEN)} --use-torch-fsdp2")),
    long(("preference", 1, f"--freeze {' '.join(FROZEN)}")),
    long(("rl", 1, f"{SMALL} --critic-offload --actor-offload --ema-decay 0.5 --bf16")),
    long(("sft", 2, f"{SMALL} --use-distributed-optimizer --lora-rank 2")),
    long(("rl", 2, f"{SMALL} --use-torch-fsdp2 --critic-exp-avg-sq-dtype fp32")),
    long(("rl", 2, f"--freeze {' '.join(FROZEN)} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
          " --expert-model-parallel-size 2 --actor-offload --bf16 --mtp-train --mtp-drafts")),
    # Experts alone are trained: the optimizer of the other parameters has none.
    long(("rl", 2, f"--freeze {' '.join(FROZEN)} *self_attention* *norm* *router* --num-experts 4 --moe-router-topk 2"
          " --moe-ffn-hidden-size 32 --expert-model-parallel-size 2 --use-distributed-optimizer")),
    *(pytest.param(*row, marks=[pytest.mark.long, needs_muon]) for row in MUON_RUNS),
]  # fmt: skip


def argv_of(name: str, save, flags: str) -> list[str]:
    if "--num-experts" in flags:
        return rl_argv(save, f"{flags} {STEPS}", warm_start=False)
    return ARGV[name](save, f"{flags} {STEPS}")


@pytest.mark.parametrize("name, size, flags", RUNS)
def test_frozen_weights_keep_their_bits_and_a_resumed_run_has_all_numbers(name, size, flags, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train(name, argv_of(name, whole, flags), size)
    train(name, argv_of(name, resumed, f"{flags} --load {folders.step_folder(whole, 1)}"), size)
    role = "reward" if name == "reward" else "actor"
    first, last, other = (
        stored_weights(save, step, role) for save, step in ((whole, 1), (whole, 3), (resumed, 3))
    )  # fmt: skip
    assert first.keys() == last.keys() == other.keys()
    assert [key for key in last if not torch.equal(last[key], other[key])] == []
    changed = {key for key in last if not torch.equal(first[key], last[key])}
    assert changed and not any(fnmatch.fnmatch(key, "embedding.*") for key in changed) or "--freeze" not in flags
    for key in changed:
        if "decoder.layers." in key and "--freeze" in flags and not key.split(".")[2].isdigit():  # a stack of layers
            assert torch.equal(first[key][0], last[key][0]) and not torch.equal(first[key][1], last[key][1])
    for step in (2, 3):
        one, two = metrics(whole)[step], metrics(resumed)[step]
        assert {key: v for key, v in one.items() if key.startswith(role)} == {
            key: v for key, v in two.items() if key.startswith(role)
        }


@pytest.mark.parametrize(
    "name, flag", [("rl", "--critic-"), long(("rl", "--")), long(("sft", "--")), long(("reward", "--"))]
)
def test_states_on_the_host_need_a_device_beside_it(name, flag, tmp_path):
    line = refusal(ARGV[name](tmp_path, f"{flag}use-distributed-optimizer {flag}optimizer-cpu-offload"), name)
    role = flag[2:-1] or {"rl": "actor", "sft": "actor", "reward": "reward"}[name]
    assert f"{role}: --optimizer-cpu-offload: needs a CUDA device; on a CPU nothing would move" in line


def test_the_check_says_what_is_frozen(tmp_path, capfd):
    lines = "\n".join(accepted(sft_argv(tmp_path, f"--freeze {' '.join(FROZEN)}"), "sft"))
    assert "trained, but " in lines and " parameters frozen" in lines
