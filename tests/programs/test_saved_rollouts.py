"""Rollouts that a run has saved: a step that is trained on them again is the same step, to the bit."""

import functools
import json
import shutil
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from megarl.batch import generated_fields
from megarl.flags.settings import Settings
from tests.helpers.forked_programs import launch
from tests.helpers.pages import documents
from tests.helpers.programs import (
    GRADED,
    PLACED,
    ROOT,
    assert_close,
    in_world,
    metrics,
    program,
    rl_argv,
    samples,
    train,
)
from tests.helpers.rollout.engine_records import saved_fields
from tests.helpers.worlds import run_world

STEPS = "--train-iters 3 --save-interval 1 --lr-decay-iters 9"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
AHEAD = "--role-map actor=0;critic=0;reward=1;reference=1;rollout=1 --rollout-correction tis --generation-lag 1"
COARSE = "--reward tests.helpers.programs:coarse_reward"
FILE = "replica_00000.log"
RUNS = {  # ranks, flags
    "ppo": (1, GRADED),
    "ahead with experts": (2, f"{GRADED} {AHEAD} {EXPERTS} --router-replay rollout"),
    "experts in two stages": (2, f"{GRADED} --pipeline-model-parallel-size 2 {EXPERTS} --router-replay rollout"),
    "baselines and filter": (1, f"--advantage remax --greedy-baseline --group-filter reward {COARSE}"),
}


@functools.cache
def saved(folder: Path, name: str) -> Path:
    """A run that keeps its rollouts and a checkpoint of each step."""
    size, flags = RUNS[name]
    save = folder / name.replace(" ", "-")
    train("rl", rl_argv(save, f"{STEPS} {flags} --save-rollouts", "experts" not in name), size)
    return save


def repeat(save: Path, run: Path, name: str, flags: str = "", size: int | None = None) -> Path:
    """Trains steps 2 and 3 of a run again from its first checkpoint."""
    start = f"--load {run}/checkpoints/step_00000001 --load-rollouts {run} --debug-train-only"
    argv = rl_argv(save, f"{STEPS} {RUNS[name][1]} {start} {flags}", "experts" not in name)
    train("rl", argv, size or RUNS[name][0])
    return save


@pytest.mark.long
@pytest.mark.parametrize("name, flags, size", [
    ("ppo", "--tensor-model-parallel-size 2 --critic-tensor-model-parallel-size 1", 2),
    ("experts in two stages", "--pipeline-model-parallel-size 1", 1),
    ("experts in two stages", "--pipeline-model-parallel-size 1 --expert-model-parallel-size 2", 2),
])  # fmt: skip
def test_a_step_is_repeated_in_another_layout_up_to_rounding(name, flags, size, folder):
    run, again = saved(folder, name), folder / f"{name}-{flags}".replace(" ", "-")
    before, after = metrics(run)[2], metrics(repeat(again, run, name, flags, size))[2]
    assert samples(again, 2) == samples(run, 2)
    assert_close(after, before, PLACED, 1e-3)
    assert after.get("router/replayed_fraction") == before.get("router/replayed_fraction")


def test_rewards_are_computed_again(folder):
    """Another reward on the same responses: the groups that the filter kept stay, what they are worth changes."""
    name = "baselines and filter"
    run = saved(folder, name)
    again = repeat(folder / "other-reward", run, name, GRADED)
    before, after = (json.loads(samples(save, 2).splitlines()[0]) for save in (run, again))
    assert before["response"] == after["response"] and before["reward"] != after["reward"]
    kept = [[json.loads(row)["kept"] for row in samples(save, 2).splitlines()] for save in (run, again)]
    assert kept[0] == kept[1] and set(kept[0]) == {True, False}
    assert metrics(again)[2]["actor/loss"] != metrics(run)[2]["actor/loss"]


def test_the_files_have_all_fields_of_generation(folder):
    step = saved(folder, "ahead with experts") / "rollouts" / "step_00000002"
    manifest = json.loads((step / "manifest.json").read_text())
    (found,) = saved_fields(saved(folder, "ahead with experts"), 2)
    assert list(manifest["files"]) == [FILE]
    assert set(found) == {*generated_fields(Settings()), "routes", "versions"} and set(
        manifest["rounds"][0]["kept"]
    ) == {True}
    assert found["prompt_ids"].tolist() == [line for line in manifest["rounds"][0]["lines"] for _ in range(2)]
    assert found["routes"].shape == (int(found["lengths"].sum()), 2, 2) and manifest["layers"] == [1, 2]
    ahead = json.loads((step.parent / "step_00000003" / "manifest.json").read_text())
    assert ahead["tokens"] == metrics(step.parents[1])[3]["rollout/tokens"]  # of the step that trains on them
    names = sorted(path.name for path in step.parent.iterdir())
    assert names == [f"step_{number:08d}" for number in (1, 2, 3)]  # nothing is generated ahead of the last step
    greedy = saved(folder, "baselines and filter")
    (found,), (responses,) = saved_fields(greedy, kind="greedy"), saved_fields(greedy)
    lines = json.loads((greedy / "rollouts" / "step_00000001" / "manifest.json").read_text())["rounds"][0]["lines"]
    assert found["prompt_ids"].tolist() == lines
    assert {"scores", "correct", "baseline_scores"} <= set(responses)


def test_the_python_of_the_page_reads_a_step(folder, tmp_path, monkeypatch):
    (code,) = (
        b.text for b in documents.blocks(documents.text_of(ROOT / "docs" / "failures.md")) if b.language == "python"
    )
    monkeypatch.chdir(tmp_path)
    Path("run").symlink_to(saved(folder, "ahead with experts"))
    found: dict = {}
    exec(code, found)
    assert [len(row) for row in found["sequences"]] == found["fields"]["lengths"].tolist()
    assert sum(map(len, found["sequences"])) == len(found["fields"]["tokens"]) > 0


# -- what is refused -----------------------------------------------------------------------------------------------


def refused(folder: Path, flags: str) -> str:
    """The one line of a run on the rollouts of "ppo" that is refused before any work; warnings may come before it."""
    run = saved(folder, "ppo")
    flags = f"{STEPS} {GRADED} --debug-train-only --load-rollouts {run} {flags}"
    status, _, err = launch(folder, rl_argv(folder / "refused", flags))
    *warnings, line = err.splitlines()
    assert status == 2 and line.startswith("megarl: error: "), err
    assert all(warning.startswith("megarl: warning: ") for warning in warnings)
    assert not (folder / "refused").exists()
    return line


def test_steps_that_are_not_there_and_the_runs_own_folder_are_refused(folder):
    """What else does not fit: tests/unit/rollout/test_rollout_files.py."""
    run = saved(folder, "ppo")
    assert f"--load-rollouts {run}: has no step 4, but steps 1-3; the run" in refused(folder, "--train-iters 5")
    line = refused(folder, f"--save {run} --load-rollouts {run}/rollouts")
    assert f"--load-rollouts {run}/rollouts: is in the earlier run of --save {run}" in line


def test_content_without_its_checksum_is_refused(folder, tmp_path):
    step = shutil.copytree(saved(folder, "ppo") / "rollouts", tmp_path / "copy") / "step_00000002"
    data = bytearray((step / FILE).read_bytes())
    data[len(data) // 2] ^= 1
    (step / FILE).write_bytes(data)
    says = f"--load-rollouts {step}: {FILE} is damaged (its content does not have its checksum)"
    assert says in refused(folder, f"--load-rollouts {step.parent}")


def generates_late(rank: int, parsed) -> list[bool]:
    """Whether rank 0 had opened the run's folder whenever this rank began to generate."""
    from megarl.checkpoint import earlier_run
    from megarl.rollout.batcher import RolloutBatcher

    store = dist.distributed_c10d._get_default_store()
    begin, generate = earlier_run.begin_branch, RolloutBatcher.generate
    found = []

    def slow(*args):
        time.sleep(0.5)  # without it, a rank that does not wait would seldom be the first
        begin(*args)
        store.set("opened", "1")

    def noted(batcher, step):
        found.append(store.check(["opened"]))
        return generate(batcher, step)

    earlier_run.begin_branch, RolloutBatcher.generate = slow, noted
    in_world(rank, "rl", parsed)
    return found


def test_no_rank_writes_before_an_older_runs_files_are_moved_aside(tmp_path):
    save, flags = (
        tmp_path / "run",
        f"{GRADED} --role-map actor=0;critic=0;reward=1;reference=1;rollout=1 --train-iters 1",
    )
    older = save / "rollouts" / "step_00000001"
    older.mkdir(parents=True)
    found = run_world(generates_late, 2, program("rl", rl_argv(save, f"{flags} --save-rollouts"), 2))
    assert found == [[True], [True]]
    assert [path.name for path in (save / "old-1" / "rollouts" / "step_00000001").iterdir()] == []
    assert (save / "rollouts" / "step_00000001" / FILE).exists()
