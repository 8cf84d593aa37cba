"""Optimizers other than Adam, frozen parameters and own rates in whole runs; their resumes are in tests/laws."""

import fnmatch

import pytest
import torch

from tests.helpers.checkpoints import stored_weights
from tests.helpers.forked_programs import accepted, refusal
from tests.helpers.programs import preference_argv, reward_argv, rl_argv, sft_argv, train
from tests.helpers.tiers import long

FROZEN = ("embedding.*", "*.layers.0.*")
RATES = "--lr-multipliers *.mlp.*=0.5 --weight-decay-multipliers *.mlp.*=3"
STEPS = "--train-iters 3 --save-interval 1 --lr-warmup-iters 0"
ARGV = {"sft": sft_argv, "rl": rl_argv, "reward": reward_argv, "preference": preference_argv}
RUNS = [  # program, ranks, flags
    ("rl", 1, f"{RATES} --critic-optimizer sgd --critic-lr 0.1 --ema-decay 0.5"),
    long(("sft", 2, "--optimizer sgd --bf16 --lr 0.1 --use-distributed-optimizer")),
    long(("reward", 2, "--use-torch-fsdp2")),
    long(("preference", 1, "")),
    long(("rl", 2, "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --expert-model-parallel-size 2"
          " --actor-offload --bf16 --mtp-train --mtp-drafts")),
]  # fmt: skip


@pytest.mark.parametrize("name, size, flags", RUNS)
def test_frozen_weights_keep_their_bits(name, size, flags, tmp_path):
    flags = f"{flags} --freeze {' '.join(FROZEN)} {STEPS}"
    argv = rl_argv(tmp_path, flags, warm_start=False) if "--num-experts" in flags else ARGV[name](tmp_path, flags)
    train(name, argv, size)
    first, last = (stored_weights(tmp_path, step, "reward" if name == "reward" else "actor") for step in (1, 3))
    changed = {key for key in last if not torch.equal(first[key], last[key])}
    assert changed and not any(fnmatch.fnmatch(key, "embedding.*") for key in changed)
    for key in changed:
        if "decoder.layers." in key and not key.split(".")[2].isdigit():  # a stack of layers
            assert torch.equal(first[key][0], last[key][0]) and not torch.equal(first[key][1], last[key][1])


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
