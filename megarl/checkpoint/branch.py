"""Makes a run's folder the folder of the branch that starts: what another branch wrote later is moved aside.

A run that resumes from an earlier step would otherwise leave later checkpoints, `latest` and metrics of a branch that
nobody continues, and a second resume would take them for its own.
"""

import itertools
from pathlib import Path

from megarl.checkpoint import commit, folders
from megarl.errors import warn
from megarl.observe.files import step_of, sync_directory, write_atomically
from megarl.observe.metrics_file import FILE_NAME, lines_after, start_fresh

ABANDONED = "abandoned"  # checkpoints/abandoned-1, …: a branch that was left, with its metrics and samples
_OUTPUTS = ("samples", "tokens", "hf", "peft", "rollouts")  # folders with a file or folder for each step


def begin(run: Path, step: int, source: Path | None, used: list[Path]):
    """Prepares a run's folder for the steps after `step`; nothing is deleted. Rank 0 only, before the first step.

    If the run resumes from its own folder, everything of later steps is moved to `checkpoints/abandoned-N/`; `latest`
    names the source first. Otherwise nothing that the folder holds belongs to the run, and all of it is moved.

    Args:
        source: checkpoint from which the run resumes; None for a new run.
        used: all checkpoints that the run has loaded, which stay.
    """
    checkpoints = run / "checkpoints"
    in_place = source is not None and source.resolve().parent == checkpoints.resolve()
    stays = {path.resolve() for path in used}
    stale = [
        folder
        for folder in sorted(checkpoints.glob("step_*"))
        if folder.resolve() not in stays and (not in_place or step_of(folder) > step)
    ]
    if in_place and (stale or folders.named(checkpoints, folders.LATEST) != source):
        commit.restart_from(checkpoints, source, stale)
    elif stale:
        commit.restart_from(checkpoints, None, stale)
    if stale:
        aside = _free(checkpoints, ABANDONED)
        if in_place:
            _move_outputs(run, step, aside)
        for folder in stale:
            folder.rename(aside / folder.name)
        sync_directory(checkpoints)
        warn([f"--save {run}: checkpoints of another branch ({stale[0].name} to {stale[-1].name}) are now in {aside}"])
    if not in_place:
        start_fresh(run)


def _free(checkpoints: Path, name: str) -> Path:
    numbered = (checkpoints / f"{name}-{number}" for number in itertools.count(1))
    folder = next(folder for folder in numbered if not folder.exists())
    folder.mkdir()
    return folder


def _move_outputs(run: Path, step: int, aside: Path):
    """Copies the metrics of later steps, which `MetricsWriter` then cuts, and moves samples, rollouts and exports."""
    if (run / FILE_NAME).exists():
        write_atomically(aside / FILE_NAME, lines_after(run / FILE_NAME, step))
    for name in _OUTPUTS:
        later = [path for path in sorted((run / name).glob("step_*")) if step_of(path) > step]
        if later:
            (aside / name).mkdir()
        for path in later:
            path.rename(aside / name / path.name)
