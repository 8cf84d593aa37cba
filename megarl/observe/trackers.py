"""Where metrics go besides metrics.jsonl: what a tracker is, TensorBoard, and how those of a run are opened.

Trackers that need a package of their own are in `megarl/extras/`. A run keeps its ids in trackers.json in its folder.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import secrets
import time
from pathlib import Path
from typing import Protocol

from megarl import bundled, child_process, plugins
from megarl.errors import UsageError, warn
from megarl.observe import activity
from megarl.observe.files import write_atomically
from megarl.plain_files import MAX_WRITTEN, read_json, reason_of

NONE, TENSORBOARD = "none", "tensorboard"
# Name in --trackers -> its class (TrackedRun -> Tracker), imported when it is opened: all but TensorBoard need the
# package of their name.
TRACKERS = {
    TENSORBOARD: "megarl.observe.trackers:TensorBoardTracker",
    "wandb": "megarl.extras.wandb_run:WandbTracker",
    "mlflow": "megarl.extras.mlflow_run:MlflowTracker",
}


class Tracker(Protocol):
    """Receives the metrics of a run, step by step."""

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """The metrics of a step; NaN and infinities among them."""

    def close(self) -> None:
        """The run has ended: waits a limited time until the tracker has everything."""


@dataclasses.dataclass(frozen=True)
class TrackerOptions:
    """The trackers of a run, and the values that they receive.

    names    of the trackers.
    project  of Weights & Biases; the experiment of MLflow.
    run      name of the run; None: that of its folder.
    folder   for the trackers' files; None: the run's folder.
    offline  write files only.
    config   all settings, as plain nested data.
    """

    names: tuple[str, ...] = (TENSORBOARD,)
    project: str = "megarl"
    run: str | None = None
    folder: Path | None = None
    offline: bool = False
    config: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """What a tracker needs to open a run, or to continue it.

    options      with the run's name and the folder filled in.
    directory    of the run.
    id           of the run, the same for all its starts; "" for TensorBoard.
    resume_step  the step after which it continues; None for a new run.
    rewinds      whether it may hold later steps, which must not be seen any more.
    """

    options: TrackerOptions
    directory: Path
    id: str
    resume_step: int | None
    rewinds: bool


def parse_names(text: str) -> tuple[str, ...]:
    """`"tensorboard,wandb"` -> ("tensorboard", "wandb"); `none` -> (). Plug-ins are names. ValueError otherwise."""
    names = tuple(name.strip() for name in text.split(","))
    if names == (NONE,):
        return ()
    if len(set(names)) < len(names) or not all(name in TRACKERS or plugins.is_plugin(name) for name in names):
        raise ValueError(f"{text!r}: allowed are {', '.join(TRACKERS)} with commas, each once, or {NONE}")
    return names


def has_remote(text: str) -> bool:
    """Whether a valid text of `parse_names` names a tracker other than TensorBoard."""
    return any(name != TENSORBOARD for name in parse_names(text))


def check_installed(text: str) -> None:
    """UsageError if the package of a tracker is missing, with the command that installs it, or a plug-in is none."""
    for name in parse_names(text):
        if name not in TRACKERS:
            plugins.load("--trackers", name, TRACKERS, takes=("run",))
        elif name != TENSORBOARD and importlib.util.find_spec(name) is None:
            raise UsageError(
                f"--trackers {name}: its package is not installed; run {bundled.install_command('trackers')}"
            )


class TensorBoardTracker:
    """Writes one event per step with tensorboard's own file writer, into `tensorboard/` of the run's folder.

    The package is imported here, so that only rank 0 pays for it. Unlike torch's SummaryWriter it needs no torch and
    writes all scalars of a step in one record.
    """

    def __init__(self, run: TrackedRun):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run.directory / TENSORBOARD))
        if run.resume_step is not None:  # restart marker: readers hide earlier events from this step on
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=run.resume_step + 1, session_log=start))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


IDS_FILE = "trackers.json"
# Set before the packages are imported, which would otherwise report their use, or their errors, to their makers.
QUIET = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
# What the user's environment may say otherwise. A server that does not answer is given up after half a minute, not
# after a quarter of an hour; rows are sent together. MLflow 3.17 refuses folders without the last one.
DEFAULTS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
DEFAULTS |= {"MLFLOW_ASYNC_LOGGING_BUFFERING_SECONDS": "3", "MLFLOW_ALLOW_FILE_STORE": "true"}


class SafeTracker:
    """A tracker that cannot end a run: its first failure is one warning, and the run goes on."""

    def __init__(self, name: str, run: TrackedRun):
        self._name, self._warned = name, False
        self._tracker: Tracker | None = None
        # The packages' processes and threads get no signal that is meant for the run.
        with self._failures(), child_process.blocked():
            self._tracker = plugins.load("--trackers", name, TRACKERS)(run)

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


def open_trackers(
    options: TrackerOptions, directory: Path, resume_step: int | None, rewinds: bool
) -> list[SafeTracker]:
    """The trackers of the run in `directory`.

    Args:
        resume_step: the step after which the run continues; None for a new one.
        rewinds: the trackers may have got later steps, which are hidden from now on.
    """
    folder, found = (options.folder or directory).resolve(), []
    options = dataclasses.replace(options, run=options.run or directory.resolve().name, folder=folder)
    ids = dict.fromkeys({TENSORBOARD} & {*options.names}, ("", False))
    if remote := [name for name in options.names if name != TENSORBOARD]:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.update(DEFAULTS | dict(os.environ) | QUIET)
        ids |= _ids(directory, remote)
    for name, (run_id, is_new) in ids.items():
        after = None if is_new else resume_step
        found.append(SafeTracker(name, TrackedRun(options, directory, run_id, after, rewinds and not is_new)))
    return found


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
