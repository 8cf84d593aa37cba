"""The commit of a real save: everything is on the disk before it gets its name, and a kill leaves the one before."""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from megarl.checkpoint import commit, folders
from megarl.errors import UsageError
from tests.helpers.checkpoints import Killed, every_death, saved
from tests.helpers.programs import program, sft_argv
from tests.helpers.worlds import SAFETY, run_world

CHANGES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


def saver(parsed, run: Path):
    """A function that saves a step of a small model to a run's folder."""
    from megarl.arguments import Settings
    from megarl.checkpoint.writer import CheckpointWriter
    from megarl.comm import role_mesh
    from megarl.roles.trainable_model import TrainableModel

    mesh = role_mesh.create_mesh(parsed.roles, SAFETY)
    model = TrainableModel(parsed.roles["actor"], mesh["actor"], 16, updates=1)
    files = {"more.pt": b"more"} if mesh.rank == 0 else {}
    writer = CheckpointWriter(run, mesh, Settings())
    return lambda step: writer.save(step, {"actor": model.state({})}, {"program": "test"}, files)


def flushes(rank: int, parsed, run: Path) -> list[tuple[str, str]]:
    """("fsync" or "rename", relative path), in order, while one step is saved."""
    save, seen, fsync, rename = saver(parsed, run), [], os.fsync, Path.rename

    def watched_fsync(descriptor):
        seen.append(("fsync", os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), run / "checkpoints")))
        fsync(descriptor)

    def watched_rename(path, target):
        seen.append(("rename", os.path.relpath(target, run / "checkpoints")))
        return rename(path, target)

    os.fsync, Path.rename = watched_fsync, watched_rename
    save(3)
    return seen


def test_every_file_and_the_folder_are_on_the_disk_before_the_name_and_latest_is_last(tmp_path):
    parsed = program("sft", sft_argv(tmp_path, "--tensor-model-parallel-size 2 --train-iters 4"), 2)
    first, second = run_world(flushes, 2, parsed, tmp_path)
    named = first.index(("rename", "step_00000003"))
    before, after = first[:named], first[named + 1 :]
    writing = ".writing-step_00000003"
    for name in ("__0_0.distcp", ".metadata", "metadata.json", "more.pt"):
        assert ("fsync", f"{writing}/{name}") in before
    assert ("fsync", f"{writing}/__1_0.distcp") in second and ("rename", "step_00000003") not in second
    assert before[-1] == ("fsync", writing) and ".manifest.json." in before[-2][1]
    assert after[0] == ("fsync", ".") and ".latest." in after[1][1] and after[2] == ("fsync", ".")
    assert len(after) == 3


class Death:
    """An audit hook that raises before the number-th change of the run's folder, and before every later one."""

    def __init__(self, run: Path):
        self.run, self.left, self.change = str(run), None, None

    def __call__(self, event, args):
        if self.left is None or event not in CHANGES or not str(args[0]).startswith(self.run):
            return
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        if event == "open" and not (isinstance(args[2], int) and args[2] & writes):
            return
        self.left -= 1
        if self.left < 0:
            self.change = self.change or f"{event} {os.path.relpath(str(args[0]), self.run)}"
            raise Killed


def killed_saves(rank: int, parsed, run: Path) -> list[tuple[str | None, int]]:
    """(change before which a save of step 2 was killed, step that a resume finds), for every change."""
    save, death, seen = saver(parsed, run), Death(run), []
    save(1)
    kept = shutil.copytree(run, run.with_name("kept"))
    sys.addaudithook(death)
    for number in range(100):
        death.left, death.change = number, None
        with contextlib.suppress(Killed):
            save(2)
        death.left = None
        found = folders.find(str(run), "--load")
        assert not folders.find_damage([found])
        seen.append((death.change, int(found.name[-8:])))
        if death.change is None:
            return seen
        save(3)  # the next run removes what the killed one left
        left = {path.name for path in (run / "checkpoints").iterdir()}
        assert left <= {"latest", "step_00000001", "step_00000002", "step_00000003"}
        shutil.rmtree(run)
        shutil.copytree(kept, run)
    raise AssertionError("the save never came to its end")


def test_a_save_killed_before_any_change_leaves_the_checkpoint_before(tmp_path):
    parsed = program("sft", sft_argv(tmp_path, "--train-iters 4"), 1)
    (((*killed, last)),) = run_world(killed_saves, 1, parsed, tmp_path / "run")
    assert last == (None, 2) and len(killed) > 8
    assert {step for _, step in killed} == {1}
    *_, named, latest = [change.split("/")[-1] for change, _ in killed if "rename" in change]
    assert named == ".writing-step_00000002" and latest.startswith(".latest.")


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[-8:]) for path in (run / "checkpoints").glob("step_*"))


def loaded(run: Path, pointer: str | None = None) -> int:
    """The step that a run or one of its pointers names; UsageError if its checkpoint is incomplete."""
    folder = folders.find(str(run / "checkpoints" / pointer if pointer else run), "--load")
    step = folders.read_manifest(folder, "--load")["step"]
    assert (folder / "tensors").read_text() == f"{step}"
    return step


# -- which ones stay ---------------------------------------------------------------------------------------------


# Checkpoints that are saved one after another, each with its steps that are there then, the latest, and the best.
STAY = {
    "the best until a better one comes": {
        (3, 3, "best"): ([3], 3, 3), (10, 3): ([3, 10], 10, 3), (12, 12, "best"): ([10, 12], 12, 12),
    },
    "for good if it was due anyway": {
        (10, 10, "interval"): ([10], 10, 10), (12, 12, "best"): ([10, 12], 12, 12),
        (15, 15, "best"): ([10, 15], 15, 15),
    },
    # A run that continues in a new folder: its best step so far was saved elsewhere.
    "none of another folder": {(20, 7): ([20], 20, None), (25, 25, "best"): ([20, 25], 25, 25)},
    "its own best of a run resumed from step 10": {
        (5, 5, "interval"): ([5], 5, 5), (10, 5): ([5, 10], 10, 5), (15, 15, "best"): ([5, 10, 15], 15, 15),
        (12, 5): ([5, 10, 12], 12, 5),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
def test_which_ones_stay(name, tmp_path):
    pointer = tmp_path / "checkpoints" / "best"
    for saves, (there, latest, best) in STAY[name].items():
        saved(tmp_path, *saves)
        assert (steps(tmp_path), loaded(tmp_path), loaded(tmp_path, "latest")) == (there, latest, latest)
        assert (pointer.read_text() if pointer.exists() else None) == (best and f"step_{best:08d}\n")
        assert best is None or loaded(tmp_path, "best") == best


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
