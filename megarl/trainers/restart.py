"""Resumes a program that a launcher starts again after a failure: `torchrun --max-restarts` or `megarl.launcher`."""

import os
from pathlib import Path

from megarl import arguments
from megarl.checkpoint import folders
from megarl.errors import UsageError
from megarl.observe.report import write_report

ATTEMPT = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun and by megarl.launcher: how often the ranks were started again
TRAINING = ("rl", "sft", "reward")


def is_restart() -> bool:
    """Whether this process replaces one that failed."""
    return os.environ.get(ATTEMPT, "0") not in ("", "0")


def parse(argv: list[str], size: int, program: str) -> arguments.RunConfig | None:
    """The configuration of a program. After a restart it continues the latest checkpoint of `--save`, if there is one.

    Returns:
        None if that checkpoint is of the last step, so that nothing is left to do.
    """
    config = arguments.parse(argv, size, program)
    if program not in TRAINING or not is_restart() or not config.settings.save:
        return config
    save = config.settings.save
    try:
        manifest = folders.read_manifest(folders.find(save, "--save"), "--save")
    except UsageError:  # none has been saved yet: start as the first time
        return config
    if manifest["step"] >= config.settings.train_iters:
        return None
    return arguments.parse([*argv, "--load", save], size, program)


def finish_report(argv: list[str], size: int, program: str):
    """Draws the report of a run that failed after its last step was saved."""
    folder = Path(arguments.parse(argv, size, program).settings.save)
    write_report(folder)
    print(f"megarl: the last step of {folder} is saved: nothing is left to do", flush=True)
