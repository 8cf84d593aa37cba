"""The best checkpoint: named, kept and replaced, and a run killed at any instant leaves checkpoints that load."""

import json
from pathlib import Path

import pytest

from megarl.checkpoint import commit, folders
from megarl.errors import UsageError
from tests.helpers.checkpoints import every_death, saved


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[-8:]) for path in (run / "checkpoints").glob("step_*"))


def loaded(run: Path, pointer: str | None = None) -> int:
    """The step that a run or one of its pointers names; UsageError if its checkpoint is incomplete."""
    folder = folders.find(str(run / "checkpoints" / pointer if pointer else run), "--load")
    step = folders.read_manifest(folder, "--load")["step"]
    assert (folder / "tensors").read_text() == f"{step}"
    return step


# -- which ones stay ---------------------------------------------------------------------------------------------


def test_the_best_stays_until_a_better_one_comes(tmp_path):
    saved(tmp_path, 3, 3, "best")
    assert (steps(tmp_path), loaded(tmp_path), loaded(tmp_path, "best")) == ([3], 3, 3)
    saved(tmp_path, 10, 3)
    assert (steps(tmp_path), loaded(tmp_path), loaded(tmp_path, "best")) == ([3, 10], 10, 3)
    saved(tmp_path, 12, 12, "best")
    assert (steps(tmp_path), loaded(tmp_path), loaded(tmp_path, "best")) == ([10, 12], 12, 12)
    assert loaded(tmp_path, "latest") == 12
    assert (tmp_path / "checkpoints" / "best").read_text() == "step_00000012\n"


def test_a_best_one_that_was_due_anyway_stays_for_good(tmp_path):
    saved(tmp_path, 10, 10, "interval")
    saved(tmp_path, 12, 12, "best")
    saved(tmp_path, 15, 15, "best")
    assert (steps(tmp_path), loaded(tmp_path, "best")) == ([10, 15], 15)


def test_without_an_evaluation_no_checkpoint_is_best(tmp_path):
    saved(tmp_path, 10, None)
    assert loaded(tmp_path) == 10 and not (tmp_path / "checkpoints" / "best").exists()
    with pytest.raises(UsageError, match="--load .*/checkpoints/best: no such folder; allowed .* checkpoints/best"):
        loaded(tmp_path, "best")


def test_checkpoints_of_an_older_version_are_left_alone(tmp_path):
    """Their manifests do not say why they were kept; neither does an unreadable manifest."""
    old, spoilt = saved(tmp_path, 1, None), saved(tmp_path, 2, None, "best")
    (old / "manifest.json").write_text(json.dumps({"step": 1, "world_size": 1, "program": "test"}))
    (spoilt / "manifest.json").write_text("{")
    saved(tmp_path, 5, 5, "best")
    assert steps(tmp_path) == [1, 2, 5]


def test_a_best_one_of_another_folder_is_not_named(tmp_path):
    """A run that continues in a new folder: its best step so far was saved elsewhere."""
    saved(tmp_path, 20, 7)
    assert not (tmp_path / "checkpoints" / "best").exists()
    saved(tmp_path, 25, 25, "best")
    assert loaded(tmp_path, "best") == 25


def test_a_run_resumed_from_an_earlier_step_has_its_own_best(tmp_path):
    saved(tmp_path, 5, 5, "interval")
    saved(tmp_path, 10, 5)
    saved(tmp_path, 15, 15, "best")
    saved(tmp_path, 12, 5)  # resumed from step 10
    assert (steps(tmp_path), loaded(tmp_path), loaded(tmp_path, "best")) == ([5, 10, 12], 12, 5)


def test_what_latest_names_is_never_removed(tmp_path):
    saved(tmp_path, 5, 5)
    saved(tmp_path, 12, 12, "best")
    commit.commit_best(tmp_path, 5)
    assert (steps(tmp_path), loaded(tmp_path), loaded(tmp_path, "best")) == ([5, 12], 12, 5)
    saved(tmp_path, 15, 5)
    assert (steps(tmp_path), loaded(tmp_path), loaded(tmp_path, "best")) == ([5, 15], 15, 5)


@pytest.mark.parametrize("text", ["", "step_00000009", "../nothing"])
def test_a_best_pointer_to_a_missing_step_is_rejected(text, tmp_path):
    saved(tmp_path, 1, 1)
    (tmp_path / "checkpoints" / "best").write_text(text)
    with pytest.raises(UsageError, match="^--load .*checkpoints"):
        loaded(tmp_path, "best")
    assert loaded(tmp_path) == 1


# -- killed at any instant ---------------------------------------------------------------------------------------


def test_a_better_one_is_saved_and_the_run_killed_at_any_instant(tmp_path, monkeypatch):
    def prepare(run):
        saved(run, 3, 3, "best")
        saved(run, 10, 3)

    seen = []
    for run in every_death(monkeypatch, tmp_path, prepare, lambda run: saved(run, 12, 12, "best")):
        seen.append((loaded(run), loaded(run, "best")))
        best = folders.read_manifest(folders.find(str(run), "--load"), "--load")["best"]["step"]
        saved(run, 20, best)  # the resumed run continues and completes the interrupted removal
        assert loaded(run, "best") == best == {10: 3, 12: 12}[seen[-1][0]]
        assert not list((run / "checkpoints").glob(".removed-*"))
        assert (3 in steps(run)) == (best == 3)
    assert seen[0] == (10, 3) and seen[-1] == (12, 12) and sorted(seen) == seen
    assert (12, 3) in seen  # between the two names


def test_a_step_is_saved_again_and_the_run_killed_at_any_instant(tmp_path, monkeypatch):
    """A run resumed at step 10 comes to 12 again, which both files name."""

    def prepare(run):
        saved(run, 5, 5, "interval")
        saved(run, 10, 5)
        saved(run, 12, 12, "best")

    seen = []
    for run in every_death(monkeypatch, tmp_path, prepare, lambda run: saved(run, 12, 12, "best")):
        best = loaded(run, "best") if (run / "checkpoints" / "best").exists() else None
        seen.append((loaded(run), best))
    assert seen[0] == seen[-1] == (12, 12) and set(seen) == {(12, 12), (10, 12), (10, None), (12, None)}


def test_a_half_written_step_is_replaced(tmp_path):
    saved(tmp_path, 1, 1)
    half = folders.step_folder(tmp_path, 2)
    half.mkdir()
    (half / "tensors").write_text("half")
    (half / "more").write_text("half")
    assert sorted(path.name for path in saved(tmp_path, 2, 2).iterdir()) == ["manifest.json", "tensors"]
    assert loaded(tmp_path) == loaded(tmp_path, "best") == 2
