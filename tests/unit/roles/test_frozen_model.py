"""`--reference-update-interval`: after each of its steps the reference is the policy, on any ranks in any layout."""

import functools
from pathlib import Path

import pytest

from megarl.checkpoint import folders
from megarl.planning import traffic
from tests.helpers.forked_programs import accepted, refusal
from tests.helpers.programs import GRADED, metrics, program, rl_argv, train
from tests.helpers.tiers import by_default
from tools._tensor_sources import CheckpointTensors

STEPS = 5
REFRESH = f"{GRADED} --reference-update-interval 2 --train-iters {STEPS} --save-interval 3 --lr-decay-iters 9 --lr 3e-3"
APART = "--role-map actor=0;critic=0;reward=0;reference=1"
EXACT = {  # ranks, flags; the reference computes as the actor does; further ones are features of tests/laws
    "same ranks": (1, ""),
    "other ranks": (2, APART),
    "factors": (1, "--lora-rank 4 --lora-targets q_proj,up_proj"),
    "factors, other ranks": (2, f"--lora-rank 4 {APART}"),
    "bf16": (2, f"--bf16 {APART}"),
    "other stages": (3, "--role-map actor=0;critic=0;reward=0;reference=1-2"
                     " --reference-pipeline-model-parallel-size 2"),
}  # fmt: skip
OTHER = {  # the reference rounds otherwise
    "other tensor layout": (2, "--reference-tensor-model-parallel-size 2"),
    "other precision": (1, "--reference-bf16"),
    "bf16 factors": (1, "--lora-rank 4 --bf16 --ppo-epochs 2"),
}


def argv(save: Path, flags: str) -> list[str]:
    return rl_argv(save, f"{REFRESH} {flags}")


@functools.cache
def run_of(folder: Path, name: str) -> Path:
    size, flags = (EXACT | OTHER)[name]
    save = folder / name.replace(" ", "-")
    train("rl", argv(save, flags), size)
    return save


@pytest.mark.parametrize("name", by_default(["same ranks", *OTHER], ["same ranks"]))
def test_after_a_refresh_the_reference_is_the_policy(name, folder):
    rows = metrics(run_of(folder, name))
    assert [rows[step]["reference/step"] for step in range(1, STEPS + 1)] == [0, 0, 2, 2, 4]
    kl = [abs(rows[step]["kl/reference"]) for step in range(1, STEPS + 1)]
    assert [step for step in rows if "weights/reference_bytes" in rows[step]] == [2, 4]
    assert min(kl[1], kl[3]) > 1e-5
    if name in EXACT:
        assert (kl[2], kl[4]) == (0, 0)
    else:
        assert kl[2] < 0.5 * kl[1] and kl[4] < 0.5 * kl[3]


@pytest.mark.parametrize("name", by_default(
    ("same ranks", "other ranks", "other stages", "factors, other ranks", "bf16"), ("same ranks", "other ranks")
))  # fmt: skip
def test_a_plan_knows_what_a_refresh_sends(name, folder):
    size, flags = EXACT[name]
    parsed = program("rl", argv(folder / "plan", flags), size)
    sent = traffic.weights_to_reference(parsed.roles, parsed.settings, 16)
    assert sent == metrics(run_of(folder, name))[2]["weights/reference_bytes"] and (sent > 0) == (name != "same ranks")


# -- checkpoints ---------------------------------------------------------------------------------------------------


def stored(save: Path, step: int, role: str) -> dict:
    """Weights of a role in a step's checkpoint by name, without its optimizer states."""
    checkpoint = folders.step_folder(save, step)
    held = folders.frozen_folder(checkpoint, folders.read_manifest(checkpoint, ""), role, "")
    tensors = CheckpointTensors(held, "")
    names = [name for name in tensors.parts if name.startswith(f"{role}.") and ".optimizer." not in name]
    return {name.removeprefix(f"{role}."): tensors.read(name) for name in names}


def frozen(save: Path, step: int) -> str:
    return folders.read_manifest(folders.step_folder(save, step), "")["frozen"]["reference"]


def test_a_mixture_is_of_the_policy_and_the_reference_before(tmp_path):
    """Against float64; checkpoints that are removed take the references that only they name with them."""
    start, kept = tmp_path / "all", tmp_path / "last"
    flags = "--reference-mixup 0.25 --save-interval 1 --advantage grpo --train-iters"
    train("rl", argv(start, f"{flags} 4"))
    reference = stored(start, 1, "reference")
    for step in (2, 3, 4):
        found, policy = stored(start, step, "reference"), stored(start, step, "actor")
        if step % 2 == 0:
            mixed = {name: 0.25 * policy[name].double() + 0.75 * reference[name].double() for name in policy}
            assert found.keys() == mixed.keys() and any((found[name] != reference[name]).any() for name in found)
            for name, value in mixed.items():
                assert (found[name] - value).abs().max() <= 1e-6 * value.abs().max(), name
        else:
            assert frozen(start, step) == frozen(start, step - 1)
        reference = found
    assert len(list((start / "checkpoints" / "frozen").iterdir())) == 3
    train("rl", argv(kept, f"{flags} 4 --keep-last 1"))
    assert [path.name for path in (kept / "checkpoints" / "frozen").iterdir()] == [frozen(start, 4)]


# -- refusals ------------------------------------------------------------------------------------------------------

REFUSED = {
    "--role-map actor=0;critic=0;reward=1;reference=1;rollout=1 --generation-lag 1 --rollout-correction tis":
        "--generation-lag 1: needs a rollout in --role-map on other ranks than the reference"
        " (--reference-update-interval 2)",
    "--reference-num-layers 3": "--reference-update-interval 2: the reference gets the actor's weights, but "
                                "--num-layers is 3 there and 2 in the actor; give both the same model",
}  # fmt: skip


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_refreshed_is_refused(flags, tmp_path):
    assert refusal(argv(tmp_path, flags), size=3) == f"megarl: error: {REFUSED[flags]}\n"


def test_a_run_of_factors_resumes_with_the_reference_that_it_had(folder, tmp_path):
    """Checkpoints have one only if it is refreshed."""
    whole, flags = run_of(folder, "factors"), EXACT["factors"][1]
    start = f"--load {folders.step_folder(whole, 3)}"
    line = refusal(argv(tmp_path / "off", f"{flags} {start} --reference-update-interval 0"))
    assert "has a reference of its own; give --reference-update-interval again, above" in line
    assert accepted(argv(tmp_path / "rare", f"{flags} {start} --reference-update-interval 99"))
    lora = "--lora-rank 4 --train-iters 1"
    train("rl", argv(tmp_path / "run", f"{lora} --reference-update-interval 0"))
    line = refusal(argv(tmp_path / "other", f"--lora-rank 4 --load {tmp_path / 'run'}"))
    assert line.endswith("has no reference.embedding.word_embeddings.weight, which reference needs\n")
