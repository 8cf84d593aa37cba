"""An earlier run in the folder of `--save`: a new run is refused there, or moves all of it aside as one folder.

What an earlier run left beside the files of a new one would be taken for its own: the last export by name, the samples
of a step that it never did, a report.
"""

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from megarl.arguments import RunConfig, Settings
from megarl.errors import UsageError, flag_of, warn
from megarl.observe.files import sync_directory
from megarl.plain_files import resolved

# All that a program writes into a run's folder, but for the stores of trackers, which hold several runs. The
# checkpoints go first: without them nothing can be resumed.
CHECKPOINTS = "checkpoints"
EXPORTS = ("hf", "peft")
LAST_WRITTEN = "timeline.json"  # of a run that has ended
FILES = (
    CHECKPOINTS, *EXPORTS, "metrics.jsonl", "samples", "tokens", "rollouts", "schedule", "journal", "sessions.jsonl",
    "tensorboard", "trackers.json", "settings.yaml", "status.json", "report.html", "report.png",
    LAST_WRITTEN, "profile", "hang",
)  # fmt: skip
OF_EVALUATION = ("evaluation.json", "samples.jsonl")  # of `evaluate --save`, whose subject may be the earlier run
_WRITTEN = ("save", "rollout_bank", "tracker_folder")  # settings that name folders to write to
_NAME = "old"  # old-1, …: an earlier run, which can be used like any other


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
    if not s.overwrite and (kept := _results(run)):
        resumed = f"--load {s.save} resumes it, " if any((run / CHECKPOINTS).glob("step_*")) else ""
        raise UsageError(
            f"--save {s.save}: holds an earlier run ({kept}); {resumed}--overwrite moves it to {_free(run)} and starts "
            "anew, and another folder leaves it as it is"
        )


def _results(run: Path) -> str:
    """What a folder has of a run that somebody may still want: checkpoints, exports, a run that has ended; or ""."""
    found = [f"{folder}/{newest.name}" for folder in (CHECKPOINTS, *EXPORTS) if (newest := _newest(run / folder))]
    return ", ".join(found or [LAST_WRITTEN] * (run / LAST_WRITTEN).exists())


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


def _free(run: Path) -> Path:
    return next(path for number in itertools.count(1) if not (path := run / f"{_NAME}-{number}").exists())


def begin(config: RunConfig, folder: str | None):
    """Empties the folder of a new run, on its first rank, before anything is written there; None: it has no folder."""
    if folder and os.environ.get("RANK", "0") == "0" and not resumes_in_place(config.settings):
        move_aside(Path(folder))


def move_aside(run: Path):
    """Moves all that a folder holds of an earlier run to a new folder `old-N` in it; nothing is deleted."""
    if not (entries := _entries(run)):
        return
    aside = _free(run)
    aside.mkdir()
    for path in entries:
        path.rename(aside / path.name)
        sync_directory(run)
    warn([f"--save {run}: the earlier run is now in {aside}"])
