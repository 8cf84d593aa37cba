"""Makes a run's folder the folder of the branch that starts: what another branch wrote later is moved aside.

A run that resumes from an earlier step would otherwise leave later checkpoints, `latest`, exports and metrics of a
branch that nobody continues, and a second resume would take them for its own.
"""

import itertools
from pathlib import Path

from megarl.checkpoint import commit, folders
from megarl.checkpoint.earlier_run import EXPORTS
from megarl.errors import warn
from megarl.observe.files import step_of, sync_directory, write_atomically
from megarl.observe.metrics_file import FILE_NAME, lines_after

ABANDONED = "abandoned"  # checkpoints/abandoned-1, …: a branch that was left, with its metrics and samples
_OUTPUTS = ("samples", "tokens", "rollouts", *EXPORTS)  # folders with a file or folder for each step


def begin(run: Path, step: int, source: Path | None, used: list[Path]):
    """Prepares the folder of a run that resumes there for the steps after `step`. Rank 0 only, before the first step.

    Everything of later steps is moved to `checkpoints/abandoned-N/`; `latest` names the source first. Nothing is
    deleted. Of a run that starts anew, or from another folder, `earlier_run` has emptied the folder.

    Args:
        source: checkpoint from which the run resumes; None for a new run.
        used: all checkpoints that the run has loaded, which stay.
    """
    checkpoints = run / "checkpoints"
    if source is None or source.resolve().parent != checkpoints.resolve():
        return
    stays = {path.resolve() for path in used}
    stale = [
        folder
        for folder in sorted(checkpoints.glob("step_*"))
        if folder.resolve() not in stays and step_of(folder) > step
    ]
    if stale or folders.named(checkpoints, folders.LATEST) != source:
        commit.restart_from(checkpoints, source, stale)
    outputs = [path for name in _OUTPUTS for path in sorted((run / name).glob("step_*")) if step_of(path) > step]
    if not stale and not outputs:
        return
    aside = _free(checkpoints, ABANDONED)
    if (run / FILE_NAME).exists():  # `MetricsWriter` then cuts it
        write_atomically(aside / FILE_NAME, lines_after(run / FILE_NAME, step))
    for path in outputs:
        (aside / path.parent.name).mkdir(exist_ok=True)
        path.rename(aside / path.parent.name / path.name)
    for folder in stale:
        folder.rename(aside / folder.name)
    sync_directory(checkpoints)
    exports = [path for path in outputs if path.parent.name in EXPORTS]
    kind = "checkpoints of another branch" if stale else "exports of steps without a checkpoint"
    if named := stale or exports:
        warn([f"--save {run}: {kind} ({named[0].name} to {named[-1].name}) are now in {aside}"])


def _free(checkpoints: Path, name: str) -> Path:
    numbered = (checkpoints / f"{name}-{number}" for number in itertools.count(1))
    folder = next(folder for folder in numbered if not folder.exists())
    folder.mkdir()
    return folder
