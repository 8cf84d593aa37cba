"""Programs with low-rank factors: exact resume in any layout, and checkpoints of factors that other programs load."""

import json
import math

import pytest
import torch

from megarl.checkpoint import folders
from megarl.errors import UsageError
from megarl.mcore.weights import dist_checkpoint
from megarl.roles.reference import shares_base
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.programs import (
    GRADED,
    inputs,
    metrics,
    preferences,
    program,
    reward_argv,
    rl_argv,
    sft_argv,
    train,
)
from tests.helpers.tiers import long

LORA = "--lora-rank 2 --lora-alpha 8 --lr 1e-2 --critic-lr 2e-2"
STEPS = "--train-iters 2 --save-interval 1 --ppo-epochs 2"
TP2 = "--tensor-model-parallel-size 2"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of two steps on one rank."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    train("rl", rl_argv(folder, f"{GRADED} {LORA} {STEPS}"))
    return folder


def test_the_rollout_agrees_and_the_policy_learns(run):
    rows = metrics(run)
    assert all(rows[step]["rollout/logprob_gap_max"] <= largest_gap_allowed() for step in (1, 2))
    assert rows[1]["actor/ppo_kl_first"] == rows[2]["actor/ppo_kl_first"] == 0
    assert rows[1]["kl/reference"] == 0 and rows[2]["kl/reference"] > 0  # B starts as 0
    assert rows[1]["actor/grad_norm"] > 0 and rows[1]["critic/grad_norm"] > 0


def test_a_checkpoint_holds_what_is_trained_alone(run):
    keys = dist_checkpoint.tensor_shapes(folders.step_folder(run, 2))
    weights = {key for key in keys if ".optimizer." not in key}
    factors = {key for key in weights if ".lora." in key}
    assert len(factors) == 2 * 2 * 7 * 2  # roles, layers, projections, A and B
    assert weights - factors == {"critic.output_layer.weight", "critic.output_layer.bias"}
    manifest = json.loads((folders.step_folder(run, 2) / "manifest.json").read_text())
    assert manifest["lora"]["actor"]["factors"]["--lora-rank"] == 2
    assert set(manifest["lora"]) == {"actor", "critic"}


def test_other_factors_are_refused(run, tmp_path):
    """Other differences are in tests/unit/checkpoint/test_pretrained.py."""
    from megarl.trainers.rl_trainer import RLInputs

    flags = f"{GRADED} {STEPS} --lora-rank 4 --lora-alpha 8 --load {folders.step_folder(run, 1)}"
    with pytest.raises(UsageError, match="the factors of the actor have --lora-rank 2; the flags give 4"):
        RLInputs(program("rl", rl_argv(tmp_path, flags), 1))


def test_other_weights_under_the_factors_are_refused(run, tmp_path):
    argv = rl_argv(tmp_path, f"{GRADED} {LORA} {STEPS} --load {folders.step_folder(run, 1)}", warm_start=False)
    with pytest.raises(AssertionError, match="the weights under the factors are not those of the checkpoint"):
        train("rl", argv)


# -- other programs ----------------------------------------------------------------------------------------------


LORA_OF_ACTOR = "--lora-rank 2 --lora-alpha 8"
SAMPLED = f"{GRADED} --eval-responses 4 --eval-temperature 1"


def evaluation(save, load, flags: str = "", size: int = 1) -> dict:
    """Metrics of a checkpoint on held-out prompts, by four sampled responses each."""
    run_evaluate(evaluate_argv(save, f"{SAMPLED} {flags}", load=load), size)
    return json.loads((save / "evaluation.json").read_text())["metrics"]


def assert_equal_to_training(found: dict, row: dict):
    names = [name for name in row if name.startswith("eval/")]
    assert len(names) > 2 and all(found[name] == row[name] for name in names)


@pytest.mark.long
def test_an_evaluation_loads_factors_in_any_layout(tmp_path):
    flags = f"{SAMPLED} {LORA} --train-iters 2 --eval-prompts {inputs()}/heldout.jsonl"
    train("rl", rl_argv(tmp_path / "run", flags))
    row = metrics(tmp_path / "run")[2]
    for size, flags in ((1, ""), (1, f"--pretrained-checkpoint {inputs()}/sft"), (2, TP2)):
        found = evaluation(tmp_path / f"{size}{len(flags)}", tmp_path / "run", flags, size)
        assert_equal_to_training(found, row)
    assert evaluation(tmp_path / "base", inputs() / "sft") != found


@pytest.mark.long
def test_factors_on_top_of_factors(tmp_path):
    """A run starts from a checkpoint of factors: its first policy is that one, and the factors under it stay."""
    first = tmp_path / "first"
    train("sft", sft_argv(first, f"{LORA_OF_ACTOR} --train-iters 4 --pretrained-checkpoint {inputs()}/sft"))
    again = "--train-iters 1 --lr 0 --weight-decay 0 --kl-coefficient 0.1"
    argv = rl_argv(tmp_path / "second", f"{GRADED} {LORA_OF_ACTOR} {again} --pretrained-checkpoint {first}")
    train("rl", [*argv, "--advantage", "grpo"])
    assert metrics(tmp_path / "second")[1]["kl/reference"] == 0
    found = [evaluation(tmp_path / name / "eval", tmp_path / name) for name in ("first", "second")]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "size, sharded", [(1, ""), long((2, "--use-torch-fsdp2")), long((2, "--use-torch-fsdp2 --bf16"))]
)
def test_a_reward_model_and_a_critic_from_factors(tmp_path, size, sharded):
    held_out = f"--eval-prompts {preferences()}/heldout-preferences.jsonl --eval-interval 10"
    flags = f"--train-iters 20 {LORA_OF_ACTOR} --lr 2e-2 {held_out} --pretrained-checkpoint {inputs()}/sft"
    train("reward", reward_argv(tmp_path / "reward", f"{flags} {sharded}"), size)
    rows = metrics(tmp_path / "reward")
    assert rows[20]["eval/loss"] < rows[10]["eval/loss"] < 0.6931
    flags = f"--train-iters 1 --reward model --reward-model {tmp_path}/reward"
    train("rl", rl_argv(tmp_path / "run", f"{flags} --critic-pretrained-checkpoint {tmp_path}/reward {sharded}"), size)
    assert metrics(tmp_path / "run")[1]["reward/std"] > 0


# -- 16 bits -----------------------------------------------------------------------------------------------------


IN_16_BITS = f"{SAMPLED} {LORA} {STEPS} --bf16"


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The folder of a run of two steps whose rollout is on the actor's ranks and layout."""
    folder = tmp_path_factory.mktemp("lora") / "half"
    train("rl", rl_argv(folder, f"{IN_16_BITS} --eval-prompts {inputs()}/heldout.jsonl --eval-interval 2"))
    return folder


def test_16_bits(half, tmp_path):
    """Factors stay apart: the rollout adds them as training does, and an evaluation, too."""
    rows = metrics(half)
    assert all(rows[step]["rollout/logprob_gap_max"] <= largest_gap_allowed(torch.bfloat16) for step in (1, 2))
    assert rows[2]["kl/reference"] > 0
    assert_equal_to_training(evaluation(tmp_path / "eval", half, "--bf16"), rows[2])


@pytest.mark.long
def test_an_evaluation_of_16_bits_on_other_ranks(half, tmp_path):
    apart = "--bf16 --role-map actor=0;rollout=1;reward=1"
    assert_equal_to_training(evaluation(tmp_path / "apart", half, apart, 2), metrics(half)[2])


ELSEWHERE = "--role-map actor=0;critic=0;reward=0;reference=0;rollout=1 --verify-weights"


@pytest.mark.long
def test_16_bits_in_a_rollout_on_other_ranks(half, tmp_path):
    """The factors alone travel to it after the first time; that no number changes is a law."""
    train("rl", rl_argv(tmp_path, f"{IN_16_BITS} {ELSEWHERE}"), 2)
    rows = metrics(tmp_path)
    assert all(rows[step]["rollout/logprob_gap_max"] <= largest_gap_allowed(torch.bfloat16) for step in (1, 2))
    shapes = dist_checkpoint.tensor_shapes(folders.step_folder(half, 2)).items()
    factors = sum(math.prod(shape) for key, shape in shapes if key.startswith("actor.lora."))
    assert rows[2]["weights/sync_bytes"] == 2 * factors > 0


@pytest.mark.long
def test_16_bits_on_top_of_factors(tmp_path):
    """The weights under a run's factors contain those of its first policy with rounding; an evaluation has the same."""
    first = f"{LORA_OF_ACTOR} --bf16 --train-iters 4 --lr 5e-2 --pretrained-checkpoint {inputs()}/sft"
    train("sft", sft_argv(tmp_path / "first", first))
    flags = f"{IN_16_BITS} --eval-prompts {inputs()}/heldout.jsonl --eval-interval 2"
    flags += f" --role-map actor=0;critic=0;reward=0;reference=1 --pretrained-checkpoint {tmp_path}/first"
    train("rl", rl_argv(tmp_path / "run", flags), 2)
    rows = metrics(tmp_path / "run")
    assert rows[1]["kl/reference"] == 0 != rows[2]["kl/reference"]  # an estimate, of either sign
    assert_equal_to_training(evaluation(tmp_path / "eval", tmp_path / "run", "--bf16"), rows[2])


@pytest.mark.long
def test_16_bits_learn_with_a_rollout_in_its_own_layout(tmp_path):
    flags = f"{LORA_OF_ACTOR} --bf16 --train-iters 14 --reward length --reward-length 1 --lr 2e-2 --kl-coefficient 0"
    flags += f" --advantage grpo {TP2} --rollout-tensor-model-parallel-size 1 --verify-weights --ppo-epochs 2"
    train("rl", rl_argv(tmp_path, flags), 2)
    rows = [row for step, row in metrics(tmp_path).items() if step]
    for row in rows:
        assert row["rollout/logprob_gap_max"] <= 0.1  # tensor-parallel sums are rounded to 16 bits
        assert row["actor/ppo_kl_first"] == row["actor/updates_skipped"] == 0
    assert rows[-1]["reward/mean"] > rows[0]["reward/mean"] + 0.3


# -- sharded parameters ------------------------------------------------------------------------------------------

FSDP = "--actor-use-torch-fsdp2 --critic-use-torch-fsdp2 --reference-use-torch-fsdp2 --verify-weights"


@pytest.mark.long
@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_sharded_parameters(run, tmp_path, precision):
    """A run learns as one without sharding, and shares its reference; that it resumes exactly is a law."""
    flags = f"{GRADED} {LORA} {STEPS} {FSDP} {precision}"
    roles = program("rl", rl_argv(tmp_path / "run", flags), 2).roles
    assert shares_base(roles["actor"], roles["reference"])
    train("rl", rl_argv(tmp_path / "run", flags), 2)
    rows, expected = metrics(tmp_path / "run"), metrics(run)
    for step in (1, 2):
        gap = largest_gap_allowed(torch.bfloat16 if precision else torch.float32)
        assert rows[step]["rollout/logprob_gap_max"] <= gap
        for name in ("reward/mean", "actor/loss", "critic/loss", "actor/grad_norm") if not precision else ():
            assert rows[step][name] == pytest.approx(expected[step][name], rel=1e-4, abs=1e-6), name
    assert rows[1]["kl/reference"] == 0 < rows[2]["kl/reference"]
    found = evaluation(tmp_path / "eval", tmp_path / "run", precision)
    assert found == evaluation(tmp_path / "sharded", tmp_path / "run", f"{precision} --actor-use-torch-fsdp2", 2)
