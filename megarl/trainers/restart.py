"""Resumes a program that a launcher starts again: `torchrun --max-restarts`, `megarl.launcher`, or Slurm.

The first rank notes in the file that MEGARL_END_FILE names why it ended, where the status that srun returns says too
little: `signal` (the run is saved and can be resumed), `limit` or `wrong input` (another start would end the same way).
"""

import os
from pathlib import Path

from megarl import arguments
from megarl.errors import UsageError
from megarl.flags.fields import TRAINING
from megarl.launcher import ATTEMPT
from megarl.observe.report import write_report

END_FILE = "MEGARL_END_FILE"


def note_end(rank: int, reason: str):
    """Writes the reason into the file of MEGARL_END_FILE; only the first rank does, and only if the variable is set."""
    file = os.environ.get(END_FILE)
    if file and rank == 0:
        Path(file).write_text(reason)


def parse(argv: list[str], size: int, program: str, ranks_per_node: int) -> tuple[arguments.RunConfig, bool]:
    """(the configuration of a program, whether nothing is left to do).

    After a restart it continues the latest checkpoint of `--save`, if there is one, which may be of the last step.
    """
    config = arguments.parse(argv, size, program, ranks_per_node)
    replaces_a_failed_process = os.environ.get(ATTEMPT, "0") not in ("", "0")
    if program not in TRAINING.split() or not replaces_a_failed_process or not config.settings.save:
        return config, False
    from megarl.checkpoint import folders  # imports torch

    save = config.settings.save
    try:
        manifest = folders.read_manifest(folders.find(save, "--save"), "--save")
    except UsageError:  # none has been saved yet: start as the first time
        return arguments.parse([*argv, "--overwrite"], size, program, ranks_per_node), False
    if manifest["step"] >= config.settings.train_iters:
        return config, True
    return arguments.parse([*argv, "--overwrite", "false", "--load", save], size, program, ranks_per_node), False


def finish_report(config: arguments.RunConfig):
    """Draws the report of a run that failed after its last step was saved."""
    folder = Path(config.settings.save)
    write_report(folder)
    print(f"megarl: the last step of {folder} is saved: nothing is left to do", flush=True)
