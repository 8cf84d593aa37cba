"""The folder of `--save` that has an earlier run, or another branch of this one: what is there is moved aside.

What an earlier run left beside the files of a new one would be taken for its own: the last export by name, the samples
of a step that it never did, a report. So a new run is refused there, or moves all of it into one folder. A run that
resumes from an earlier step would leave later checkpoints, `latest`, exports and metrics of a branch that nobody
continues, and a second resume would take them for its own.
"""

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from megarl.arguments import RunConfig, Settings
from megarl.checkpoint import commit, folders
from megarl.errors import UsageError, flag_of, warn
from megarl.observe.files import step_of, sync_directory, write_atomically
from megarl.observe.metrics_file import FILE_NAME, lines_after
from megarl.plain_files import resolved

# All that a program writes into a run's folder, but for the stores of trackers, which hold several runs, and responses
# of a killed run, which any run with the same requests may use. The checkpoints go first: without them nothing can be
# resumed.
CHECKPOINTS = "checkpoints"
EXPORTS = ("hf", "peft")
LAST_WRITTEN = "timeline.json"  # of a run that has ended
_RECORDS = """
    metrics.jsonl samples tokens rollouts schedule journal images sessions.jsonl tensorboard trackers.json settings.yaml
    status.json report.html report.png
"""
FILES = (CHECKPOINTS, *EXPORTS, *_RECORDS.split(), LAST_WRITTEN, "profile", "hang")
OF_EVALUATION = ("evaluation.json", "samples.jsonl")  # of `evaluate --save`, whose subject may be the earlier run
_WRITTEN = ("save", "tracker_folder")  # settings that name folders to write to
_NAME = "old"  # old-1, …: an earlier run, which can be used like any other
ABANDONED = "abandoned"  # checkpoints/abandoned-1, …: a branch that was left, with its metrics and samples
_OUTPUTS = ("samples", "tokens", "rollouts", *EXPORTS)  # folders with a file or folder for each step


def resumes_in_place(settings: Settings) -> bool:
    """Whether `--load` names the run in `--save`, or a checkpoint of it."""
    if not (settings.load and settings.save):
        return False
    load, run = resolved(settings.load), resolved(settings.save)
    return load == run or load.parent == run / CHECKPOINTS


def check(config: RunConfig):
    """UsageError if a new run would begin in the folder of an earlier one, and no flag says that it shall.

    Only the first rank, which writes there, looks.
    """
    s = config.settings
    if not s.save or os.environ.get("RANK", "0") != "0":
        return
    run = Path(s.save)
    if resumes_in_place(s):
        if s.overwrite:
            raise UsageError(f"--overwrite: --load {s.load} resumes the run in --save {s.save}; give one of the two")
        return
    _check_inputs(config, run)
    found = [f"{folder}/{newest.name}" for folder in (CHECKPOINTS, *EXPORTS) if (newest := _newest(run / folder))]
    found += [f"{held.name} in host memory" for held in folders.in_memory(run)][-1:]
    # What somebody may still want: checkpoints, exports, a run that has ended.
    if not s.overwrite and (kept := ", ".join(found or [LAST_WRITTEN] * (run / LAST_WRITTEN).exists())):
        resumed = f"--load {s.save} resumes it, " if any((run / CHECKPOINTS).glob("step_*")) else ""
        raise UsageError(
            f"--save {s.save}: holds an earlier run ({kept}); {resumed}--overwrite moves it to {_free(run, _NAME)} "
            "and starts anew, and another folder leaves it as it is"
        )


def _newest(folder: Path) -> Path | None:
    return max(folder.glob("step_*"), default=None)


def _check_inputs(config: RunConfig, run: Path):
    """UsageError for a flag that names the earlier run or a file of it, which would no longer be there."""
    moved = [resolved(path) for path in _entries(run)]
    for flag, value in _texts(config):
        for word in re.split(r"[\s,=]+", value):
            path = resolved(word)
            if word and moved and (path == resolved(run) or any(path.is_relative_to(entry) for entry in moved)):
                raise UsageError(
                    f"{flag} {value}: is in the earlier run of --save {run}, which a new run moves aside; give the "
                    "new run another folder"
                )


def _texts(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(flag, text) of all settings that may name files."""
    for name, value in vars(config.settings).items():
        if isinstance(value, str) and name not in _WRITTEN:
            yield flag_of(name), value
    for role in config.roles.values():
        if role.hf_model is not None:
            yield role.hf_model.folder.flag, str(role.hf_model.folder.path)
        if role.megatron.pretrained_checkpoint:
            yield "--pretrained-checkpoint", role.megatron.pretrained_checkpoint


def _entries(run: Path) -> list[Path]:
    """What a folder has of an earlier run, in the order in which it is moved; [] without one."""
    found = [run / name for name in FILES if (run / name).exists()]
    return found + [run / name for name in OF_EVALUATION if found and (run / name).exists()]


def _free(folder: Path, name: str) -> Path:
    """The first of NAME-1, NAME-2, … that the folder does not have."""
    return next(path for number in itertools.count(1) if not (path := folder / f"{name}-{number}").exists())


def begin(config: RunConfig, folder: str | None):
    """Empties the folder of a new run, on its first rank, before anything is written there; None: it has no folder."""
    if folder and os.environ.get("RANK", "0") == "0" and not resumes_in_place(config.settings):
        move_aside(Path(folder))


def move_aside(run: Path):
    """Moves all that a folder holds of an earlier run to a new folder `old-N` in it; nothing is deleted."""
    if not (entries := _entries(run)):
        return
    aside = _free(run, _NAME)
    aside.mkdir()
    for path in entries:
        path.rename(aside / path.name)
        sync_directory(run)
    warn([f"--save {run}: the earlier run is now in {aside}"])


def begin_branch(run: Path, step: int, source: Path | None, used: list[Path]):
    """Prepares the folder of a run that resumes there for the steps after `step`. Rank 0 only, before the first step.

    Everything of later steps is moved to `checkpoints/abandoned-N/`; `latest` names the source first. Nothing is
    deleted. Of a run that starts anew, or from another folder, `begin` has emptied the folder. `source`: checkpoint
    from which the run resumes, or None; `used`: all that it has loaded, which stay.
    """
    checkpoints = run / CHECKPOINTS
    if source is None or not folders.is_of_run(source, run):
        return
    stays, later = {path.resolve() for path in used}, sorted(checkpoints.glob("step_*"))
    stale = [folder for folder in later if folder.resolve() not in stays and step_of(folder) > step]
    kept = source
    if source in folders.in_memory(run):
        before = (folder for folder in folders.complete(checkpoints)[::-1] if folder not in stale)
        kept = next(before, None)
    if stale or folders.named(checkpoints, folders.LATEST) != kept:
        commit.restart_from(checkpoints, kept, stale)
    outputs = [path for name in _OUTPUTS for path in sorted((run / name).glob("step_*")) if step_of(path) > step]
    if not stale and not outputs:
        return
    aside = _free(checkpoints, ABANDONED)
    aside.mkdir(parents=True)  # a run may have checkpoints in memory alone
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
