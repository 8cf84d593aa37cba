"""The commit of a real save: everything is on the disk before it gets its name, and a kill leaves the one before."""

import contextlib
import os
import shutil
import sys
from pathlib import Path

from megarl.checkpoint import folders, integrity
from tests.helpers.checkpoints import Killed
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
        assert not integrity.find_damage([found])
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
