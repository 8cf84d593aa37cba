"""Small checkpoints for tests, and runs that are killed between two changes of the file system."""

import shutil
from pathlib import Path

import torch

from megarl.checkpoint import commit, folders, manifest
from tools._tensor_sources import CheckpointTensors

# A run whose checkpoints also hold groups that wait for their batch, and unfinished groups.
WAITING = (
    "--advantage grpo --group-filter reward --dynamic-sampling --max-sampling-rounds 1 --over-sampling 1.5"
    " --partial-rollouts --rollout-correction tis --reward tests.helpers.programs:coarse_reward"
)


class Killed(BaseException):
    """Simulates the end of the process: no later code runs."""


class Attack:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def saved(
    run: Path, step: int, best: int | None = None, kept_for: str = "interval", accuracy: float = 0.5, skipped: int = 0
) -> Path:
    """A checkpoint saved as `CheckpointWriter.save` does, with one file instead of its tensors."""
    folder = folders.step_folder(run, step)
    commit.make_room(run, folder.name)
    tensors = commit.writing_folder(run, folder.name) / "tensors"
    tensors.write_text(f"{step}")
    entries = {
        "world_size": 1,
        "program": "test",
        "kept_for": kept_for,
        "best": {"step": best, "accuracy": accuracy},
        "skipped_in_a_row": skipped,
    }
    commit.commit(run, step, entries, {"tensors": manifest.seal(tensors)})
    commit.sweep(run)
    return folder


def stored_weights(save: Path, step: int, role: str) -> dict[str, torch.Tensor]:
    """Weights under a role's keys in a step's checkpoint by name."""
    tensors = CheckpointTensors(folders.step_folder(save, step), "")
    names = [name for name in tensors.parts if name.startswith(f"{role}.") and ".optimizer." not in name]
    return {name.removeprefix(f"{role}."): tensors.read(name) for name in names}


def save_state(state: dict, folder: Path):
    """Saves a state as `CheckpointWriter` does, without a manifest; a collective of the whole world."""
    import torch.distributed as dist

    from megarl.mcore.weights.checkpoint_files import plan_save

    planned = plan_save(state, folder)
    results = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(planned.write()[0], results, dst=0)
    if results is not None:
        planned.finish(results)
    dist.barrier()


def killed_before(monkeypatch, number: int, action, *modules) -> bool:
    """Runs `action` up to before its number-th change of the file system; whether it was killed there."""
    seen = []

    def deadly(change):
        def wrapper(*args, **kwargs):
            seen.append(change)
            if len(seen) > number:
                raise Killed
            return change(*args, **kwargs)

        return wrapper

    def tree(path, ignore_errors=False):  # goes file by file, as the real one does
        for file in sorted(Path(path).rglob("*")) if Path(path).exists() else []:
            deadly(Path.unlink)(file)
        shutil_rmtree(path, ignore_errors)

    shutil_rmtree = shutil.rmtree
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", deadly(tree))
        for module in (folders, manifest, *modules):
            patch.setattr(module, "write_atomically", deadly(module.write_atomically))
        for name in ("mkdir", "rename", "unlink"):
            patch.setattr(Path, name, deadly(getattr(Path, name)))
        try:
            action()
        except Killed:
            return True
    return False


def every_death(monkeypatch, folder: Path, prepare, action, *modules):
    """The run's folder as each possible instant of death leaves it, and last as a life to the end does.

    `modules`: others that write files with `write_atomically`.
    """
    for number in range(100):
        run = folder / str(number)
        prepare(run)
        died = killed_before(monkeypatch, number, lambda run=run: action(run), *modules)
        yield run
        if not died:
            assert number > 5  # changes that were met
            return
    raise AssertionError("it never came to its end")
