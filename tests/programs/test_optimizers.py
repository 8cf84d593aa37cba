"""Optimizers other than Adam, frozen parameters, own rates and bf16 in whole runs; their resumes are in tests/laws."""

import fnmatch

import pytest
import torch

from tests.helpers.checkpoints import stored_weights
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.forked_programs import accepted, refusal
from tests.helpers.programs import metrics, preference_argv, reward_argv, rl_argv, sft_argv, train
from tests.helpers.rollout.engine_layouts import EXPERTS, generate_in_layout
from tests.helpers.rollout.engines import NEVER
from tests.helpers.tiers import long
from tests.helpers.tools import SMALL
from tests.helpers.worlds import run_world
from tools.bench import precision

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


KINDS = ["--hidden-size 256 --num-attention-heads 8 --ffn-hidden-size 768", EXPERTS]


def gaps(rank) -> list[float]:
    return [generate_in_layout(rank, f"--bf16 {kind}", {"temperature": 1.2}, NEVER)[1] for kind in KINDS]


def test_rollout_and_training_agree():
    assert max(run_world(gaps, 1)[0]) <= largest_gap_allowed(torch.bfloat16)


@pytest.mark.long
def test_a_bf16_policy_trains(tmp_path):
    flags = "--bf16 --train-iters 14 --reward length --reward-length 1 --lr 3e-3 --kl-coefficient 0 --advantage grpo"
    train("rl", rl_argv(tmp_path, f"{flags} --ppo-epochs 2"), 1)
    rows = [row for step, row in metrics(tmp_path).items() if step]
    for row in rows:
        assert row["rollout/logprob_gap_max"] <= largest_gap_allowed(torch.bfloat16)
        assert row["actor/ppo_kl_first"] == row["actor/updates_skipped"] == 0
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.3


def both_sides(rank, case: str) -> dict:
    precision.PROMPTS, precision.LENGTH = [5, 3, 4, 5, 4], 9
    return precision.measure(case, 1, SMALL)


@pytest.mark.long
@pytest.mark.parametrize("case", precision.CASES)
def test_the_benchmark_alternates_its_sides(case):
    (found,) = run_world(both_sides, 1, case)
    assert set(found["sides"]) == {"fp32", "bf16"} and set(found["ratio"]) == {"fp32"}
    assert found["ratio"]["fp32"] == found["sides"]["fp32"]["median_s"] / found["sides"]["bf16"]["median_s"]
