"""Opens the trackers of a run, new or continued. Their ids are in trackers.json in the run's folder."""

import json
import secrets
from pathlib import Path

from megarl.errors import warn
from megarl.observe.files import write_atomically
from megarl.observe.trackers.base import REMOTE, TENSORBOARD, TrackedRun, Tracker, TrackerOptions
from megarl.observe.trackers.process import TrackerProcess
from megarl.observe.trackers.tensorboard import TensorBoardTracker

IDS_FILE = "trackers.json"


def open_trackers(options: TrackerOptions, directory: Path, resume_step: int | None, rewinds: bool) -> list[Tracker]:
    """The trackers of the run in `directory`.

    Args:
        resume_step: the step after which the run continues; None for a new one.
        rewinds: the trackers may have got later steps, which are hidden from now on.
    """
    found: list[Tracker] = []
    if TENSORBOARD in options.names:
        purge_step = None if resume_step is None else resume_step + 1
        found.append(TensorBoardTracker(directory / "tensorboard", purge_step))
    remote = [name for name in options.names if name in REMOTE]
    folder = (options.folder or directory).resolve()
    if remote:
        folder.mkdir(parents=True, exist_ok=True)
    ids = _ids(directory, remote) if remote else {}
    for name in remote:
        run_id, is_new = ids[name]
        found.append(
            TrackerProcess(
                TrackedRun(
                    tracker=name,
                    id=run_id,
                    project=options.project,
                    name=options.run or directory.resolve().name,
                    folder=str(folder),
                    offline=options.offline,
                    config=options.config,
                    resume_step=None if is_new else resume_step,
                    rewinds=rewinds and not is_new,
                ),
                directory / "trackers.log",
            )
        )
    return found


def _ids(directory: Path, names: list[str]) -> dict[str, tuple[str, bool]]:
    """Name of a tracker -> id of its run, and whether it is new. The file is written first: a run that is killed at
    once continues the same run."""
    path, ids = directory / IDS_FILE, {}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict):
            raise ValueError("it holds no JSON object")
        ids = {name: found for name, found in stored.items() if isinstance(found, str) and found.isalnum()}
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        warn([f"{path}: cannot be read ({' '.join(str(error).split())}); the trackers get new runs"])
    new = {name: secrets.token_hex(6) for name in names if name not in ids}
    if new:
        write_atomically(path, json.dumps(ids | new, indent=1, sort_keys=True) + "\n")
    return {name: (ids.get(name) or new[name], name in new) for name in names}
