"""A run that resumes from an earlier step: the new branch is the folder's at once, nothing is deleted."""

import contextlib
import json
from pathlib import Path

import pytest

from megarl.checkpoint import branch, folders
from megarl.observe.metrics_file import MetricsWriter
from megarl.observe.samples import write_samples
from tests.helpers.checkpoints import every_death, saved


def written_run(run: Path, best: int | None = None):
    """A run of four steps with a checkpoint after each, samples and metrics."""
    with contextlib.closing(MetricsWriter(run, None)) as writer:
        for step in range(1, 5):
            writer.write(step, {"loss": step / 3})
            write_samples(run, step, [{"response": str(step)}, {"response": str(step), "tokens": []}])
    (run / "hf" / "step_00000003").mkdir(parents=True)
    for step in range(1, 5):
        saved(run, step, best if best and best <= step else None)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def found(run: Path) -> str:
    return folders.find(str(run), "--load").name


def lines(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_run_from_an_earlier_step_leaves_the_later_ones_aside(tmp_path, capsys):
    written_run(tmp_path)
    checkpoints, source = tmp_path / "checkpoints", folders.step_folder(tmp_path, 2)
    branch.begin(tmp_path, 2, source, [source])
    assert names(checkpoints) == ["abandoned-1", "latest", "step_00000001", "step_00000002"]
    assert found(tmp_path) == "step_00000002" and (checkpoints / "latest").read_text() == "step_00000002\n"
    assert capsys.readouterr().err.count("\n") == 1
    aside = checkpoints / "abandoned-1"
    assert names(aside) == ["hf", "metrics.jsonl", "samples", "step_00000003", "step_00000004", "tokens"]
    assert lines(aside / "metrics.jsonl") == [3, 4] and names(aside / "hf") == ["step_00000003"]
    for folder in ("samples", "tokens"):
        assert names(aside / folder) == ["step_00000003.jsonl", "step_00000004.jsonl"]
        assert names(tmp_path / folder) == ["step_00000001.jsonl", "step_00000002.jsonl"]
    folders.check(aside / "step_00000004", "--load")  # it can still be loaded
    MetricsWriter(tmp_path, 2).close()
    assert lines(tmp_path / "metrics.jsonl") == [1, 2]


def test_a_run_from_its_last_step_changes_nothing(tmp_path, capsys):
    written_run(tmp_path)
    source = folders.step_folder(tmp_path, 4)
    before = sorted(tmp_path.rglob("*"))
    branch.begin(tmp_path, 4, source, [source])
    assert sorted(tmp_path.rglob("*")) == before and not capsys.readouterr().err


@pytest.mark.parametrize("best, named", [(1, "step_00000001"), (3, None), (2, "step_00000002")])
def test_best_names_no_checkpoint_of_the_other_branch(best, named, tmp_path):
    written_run(tmp_path, best)
    source = folders.step_folder(tmp_path, 2)
    branch.begin(tmp_path, 2, source, [source])
    pointer = folders.named(tmp_path / "checkpoints", "best")
    assert (pointer and pointer.name) == named


def test_exports_of_steps_without_a_checkpoint_are_not_the_resumed_runs(tmp_path, capsys):
    written_run(tmp_path)
    (tmp_path / "peft" / "step_00000006").mkdir(parents=True)
    (tmp_path / "samples" / "step_00000005.jsonl").write_text("")
    source = folders.step_folder(tmp_path, 4)
    branch.begin(tmp_path, 4, source, [source])
    aside = tmp_path / "checkpoints" / "abandoned-1"
    assert names(aside) == ["metrics.jsonl", "peft", "samples"] and names(aside / "samples") == ["step_00000005.jsonl"]
    assert names(tmp_path / "peft") == [] and names(tmp_path / "hf") == ["step_00000003"]
    assert "exports of steps without a checkpoint (step_00000006 to step_00000006)" in capsys.readouterr().err
    assert found(tmp_path) == "step_00000004"


def test_killed_at_any_instant_the_branch_that_starts_is_the_one_that_resumes(tmp_path, monkeypatch):
    def start(run):
        source = folders.find(str(folders.step_folder(run, 2)), "--load")
        branch.begin(run, 2, source, [source])

    seen = []
    for run in every_death(monkeypatch, tmp_path, lambda run: written_run(run, 3), start, branch):
        seen.append(found(run))
        start(run)  # once more
        moved = sorted(path.name for path in (run / "checkpoints").glob("abandoned-*/step_*"))
        assert found(run) == "step_00000002" and moved == ["step_00000003", "step_00000004"]
    assert seen[0] == "step_00000004" and set(seen[1:]) == {"step_00000002"}
