"""What a tracker is, its names, and the options that all of them share."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Protocol

from megarl import bundled, plugins
from megarl.errors import UsageError
from megarl.observe.trackers import TRACKERS

NONE, TENSORBOARD = "none", "tensorboard"


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
    id           of the run, the same for all its starts.
    resume_step  the step after which it continues; None for a new run.
    rewinds      whether it may hold later steps, which must not be seen any more.
    """

    options: TrackerOptions
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
    return not {TENSORBOARD}.issuperset(parse_names(text))


def check_installed(text: str) -> None:
    """UsageError if the package of a tracker is missing, with the command that installs it, or a plug-in is none."""
    for name in parse_names(text):
        if name not in TRACKERS:
            plugins.load("--trackers", name, TRACKERS, takes=("run",))
        elif name != TENSORBOARD and importlib.util.find_spec(name) is None:
            raise UsageError(
                f"--trackers {name}: its package is not installed; run {bundled.install_command('trackers')}"
            )
