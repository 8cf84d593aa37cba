"""Models in bf16: rollout and training agree, and a whole program trains."""

import pytest
import torch

from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.programs import metrics, rl_argv, train
from tests.helpers.rollout.engine_layouts import EXPERTS, generate_in_layout
from tests.helpers.rollout.engines import NEVER
from tests.helpers.tools import SMALL
from tests.helpers.worlds import run_world
from tools.bench import precision

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
