"""Opens the trackers of a run, new or continued. Their ids are in trackers.json in the run's folder."""

import contextlib
import dataclasses
import functools
import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from megarl import plugins, stop_signals
from megarl.errors import warn
from megarl.observe import activity
from megarl.observe.files import write_atomically
from megarl.observe.trackers import TRACKERS
from megarl.observe.trackers.base import TENSORBOARD, TrackedRun, Tracker, TrackerOptions
from megarl.observe.trackers.tensorboard import TensorBoardTracker
from megarl.plain_files import MAX_WRITTEN, read_json, reason_of

IDS_FILE = "trackers.json"
# Set before the packages are imported, which would otherwise report their use, or their errors, to their makers.
QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
# What the user's environment may say otherwise. A server that does not answer is given up after half a minute, not
# after a quarter of an hour; rows are sent together. MLflow 3.17 refuses folders without the last one.
DEFAULTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
            "MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS": "3", "MLFLOW_ALLOW_FILE_STORE": "true"}  # fmt: skip


class SafeTracker:
    """A tracker that cannot end a run: its first failure is one warning, and the run goes on."""

    def __init__(self, name: str, open_tracker: Callable[[], Tracker]):
        self._name, self._warned = name, False
        self._tracker: Tracker | None = None
        # The packages' processes and threads get no signal that is meant for the run.
        with self._failures(), stop_signals.blocked():
            self._tracker = open_tracker()

    def write(self, step: int, scalars: dict[str, float]) -> None:
        with self._failures():
            if self._tracker:
                self._tracker.write(step, scalars)

    def close(self) -> None:
        with self._failures():
            if self._tracker:
                self._tracker.close()

    @contextlib.contextmanager
    def _failures(self):
        try:
            with activity.limited():
                yield
        except Exception as error:
            if not self._warned:
                self._warned = True
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                warn([f"--trackers {self._name}: {reason}; the run goes on, its metrics.jsonl is complete"])


def open_trackers(options: TrackerOptions, directory: Path, resume_step: int | None, rewinds: bool) -> list[Tracker]:
    """The trackers of the run in `directory`.

    Args:
        resume_step: the step after which the run continues; None for a new one.
        rewinds: the trackers may have got later steps, which are hidden from now on.
    """
    found: list[Tracker] = []
    if TENSORBOARD in options.names:
        purge_step = None if resume_step is None else resume_step + 1
        found.append(SafeTracker(TENSORBOARD, lambda: TensorBoardTracker(directory / "tensorboard", purge_step)))
    remote = [name for name in options.names if name != TENSORBOARD]
    if not remote:
        return found
    folder = (options.folder or directory).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    options = dataclasses.replace(options, run=options.run or directory.resolve().name, folder=folder)
    os.environ.update(DEFAULTS | dict(os.environ) | QUIET)
    for name, (run_id, is_new) in _ids(directory, remote).items():
        after = None if is_new else resume_step
        run = TrackedRun(options=options, id=run_id, resume_step=after, rewinds=rewinds and not is_new)
        found.append(SafeTracker(name, functools.partial(_open, name, run)))
    return found


def _open(name: str, run: TrackedRun) -> Tracker:
    """Imports the package, or the plug-in. Raises whatever it raises."""
    return plugins.load("--trackers", name, TRACKERS)(run)


def _ids(directory: Path, names: list[str]) -> dict[str, tuple[str, bool]]:
    """Name of a tracker -> id of its run, and whether it is new. The file is written first: a run that is killed at
    once continues the same run."""
    path, ids = directory / IDS_FILE, {}
    try:
        stored = read_json(path, MAX_WRITTEN)
        if not isinstance(stored, dict):
            raise ValueError("it holds no JSON object")
        ids = {name: found for name, found in stored.items() if isinstance(found, str) and found.isalnum()}
    except FileNotFoundError:
        pass
    except Exception as error:  # a file made for harm can raise anything
        warn([f"{path}: cannot be read ({reason_of(error)}); the trackers get new runs"])
    new = {name: secrets.token_hex(6) for name in names if name not in ids}
    if new:
        write_atomically(path, json.dumps(ids | new, indent=1, sort_keys=True) + "\n")
    return {name: (ids.get(name) or new[name], name in new) for name in names}
