"""Entry point of all programs: parses flags, sets the exit status, and reports in one line where a rank failed.

A program that a launcher starts again (`torchrun --max-restarts`, `megarl.launcher`, or Slurm) resumes. The first rank
notes in the file that MEGARL_END_FILE names why it ended, where the status that srun returns says too little: `signal`
(the run is saved and can be resumed), `limit` or `wrong input` (another start would end the same way).
MEGARL_FOLDER_FILE gets the folder of a training run, for the line about a rank that was killed.
"""

import contextlib
import gc
import os
import sys
import time
from pathlib import Path

from megarl import arguments, plugins
from megarl.cluster import slurm
from megarl.cluster.cpu_cores import cores
from megarl.deferred import has_met, torch
from megarl.errors import CHECKS_FIRST, STOPPED, RunStopped, TooManyFailures, UsageError, warn_as_first
from megarl.faults import heartbeat, last_line, run_lock
from megarl.flags.fields import TRAINING
from megarl.launcher import ATTEMPT
from megarl.observe import samples
from megarl.observe.timers import Timers
from megarl.rewards import isolated

REPORT_FIRST = 10.0  # seconds


def launch(train, program: str, parse=None):
    """Parses the command line and runs `train(config, timers)`.

    Wrong input ends the program with one line and exit status 2 before any work starts. Any other exception ends the
    rank's process with status 1 and a line that names rank, role, phase and step; the launcher ends the other ranks.

    Args:
        train: the program's main function; what it returns is the exit status, None is 0.
        program: a key of `flags.parser.MODULES`, such as 'rl'.
        parse: instead of `parse_or_resume`.
    """
    rank, config = 0, None
    timers = Timers()
    gc.disable()  # until `setup.read_inputs`: imports make half a million objects, whose collection takes long
    try:
        _adopt_slurm_task()
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        config, is_finished = (parse or parse_or_resume)(sys.argv[1:], size, program, per_node)
        if is_finished:
            if rank == 0:
                finish_report(Path(str(config.settings.save)))
            return
        save = config.settings.save or "" if program in TRAINING.split() else ""
        if os.environ.get(CHECKS_FIRST):
            os.environ[last_line.SAVE] = save
        _write(FOLDER_FILE, rank, save)
        warn_as_first(config.warnings)
        if "reward" in config.roles and rank in {0, *config.roles["reward"].ranks}:
            isolated.begin(term.name for term in config.rewards)  # they import while this process does
        from megarl.mcore import cuda_environment  # after the flags, since it imports torch

        cuda_environment.choose(role.megatron for role in config.roles.values() if rank in role.ranks)
        status = train(config, timers)
        heartbeat.finish()
    except UsageError as error:
        heartbeat.is_first_to_fail()  # if the ranks have met
        refuse(rank, arguments.with_sources(error, sys.argv[1:], program))
        note_end(rank, "wrong input")
        sys.exit(2)
    except RunStopped as error:
        line = f"megarl: stopped: {error}"
        print(line, file=sys.stderr)
        last_line.note(line, is_alone=True)
        note_end(rank, "limit")
        _exit(STOPPED)
    except Exception as error:
        _fail(rank, timers, error)
    except SystemExit as error:
        if config is None or config.check:
            raise
        _fail(rank, timers, error)  # a plug-in called sys.exit: the other ranks would wait for this one
    finally:
        run_lock.release()
        gc.enable()
        gc.unfreeze()  # triton's bindings report objects that still exist at exit
        if has_met():
            torch.distributed.destroy_process_group()
    if status:
        sys.exit(status)


def _adopt_slurm_task():
    """Gives a task of srun the environment that torchrun would give it, and its share of the node's cores."""
    found = slurm.rank_environment(os.environ)
    os.environ.update(found)
    if not has_met():  # in a program around this one
        slurm.check_launcher(os.environ)
    if found and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(slurm.threads_per_rank(os.environ, cores()))


def refuse(rank: int, error: UsageError):
    """Prints the line of wrong input on one rank.

    The others wait: a launcher kills all ranks when one ends, and the line must come first. A rank that waits in vain
    has found what the reporting rank has not, such as a file that is missing on its node alone.
    """
    if rank != error.reporting_rank:
        time.sleep(REPORT_FIRST)
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        error = f"rank {rank}: {error}"
    line = f"megarl: error: {error}"
    last_line.note(line, is_alone=True)
    print(line, file=sys.stderr, flush=True)


def _fail(rank: int, timers: Timers, error: BaseException):
    """Ends this process with status 1 and says where it failed, in the first line and in the last.

    Ranks that fail after another one have lost their connections to it, or have the same error: they are silent.
    """
    role, phase = timers.current() or ("program", "between phases" if timers.step else "set-up")
    reason = " ".join(f"{type(error).__name__}: {error}{plugins.place_of(error)}".split())
    where = f"{role}/{phase} of step {timers.step}"
    is_first = heartbeat.is_first_to_fail()
    line = f"megarl: rank {rank} failed in {where}: {reason}{_keep_samples(rank, timers.step, error)}"
    if is_first is False and not plugins.shows_all():
        last_line.note(None)
        _exit(1)
    shown = ""
    if plugins.shows_all() or not (is_first is None or _has_lost_a_rank(error)) or plugins.place_of(error):
        shown = plugins.traceback_of(error)
    is_told = last_line.note(line, is_alone=not shown)
    print(line, *shown.splitlines(), sep="\n", file=sys.stderr, flush=True)
    if shown and not is_told:
        print(line, file=sys.stderr, flush=True)
    _exit(1)


def _has_lost_a_rank(error: BaseException) -> bool:
    """Whether a rank has gone without a word, such as a killed one: the cause is not here."""
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in lost)


def _keep_samples(rank: int, step: int, error: BaseException) -> str:
    """Writes this rank's samples of the step if the user's code failed; says where they are.

    After other errors it writes nothing: ranks that have lost their connections would all do so, and tensors may be
    out of reach.
    """
    if not (isinstance(error, TooManyFailures) or plugins.place_of(error)):
        return ""
    try:
        path = samples.write_failed(rank, step)
    except Exception as problem:
        return " ".join(f"; its samples could not be written: {type(problem).__name__}: {problem}".split())
    return f"; the samples of the step are in {path}" if path else ""


def _exit(status: int):
    """Ends this process at once: a normal exit would wait for collectives that the other ranks never join."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    sys.stderr.flush()
    heartbeat.report_failure()
    run_lock.release()
    os._exit(status)


END_FILE, FOLDER_FILE = "MEGARL_END_FILE", "MEGARL_FOLDER_FILE"


def note_end(rank: int, reason: str):
    """Writes the reason into the file of MEGARL_END_FILE; only the first rank does, and only if the variable is set."""
    _write(END_FILE, rank, reason)


def _write(variable: str, rank: int, text: str):
    if (file := os.environ.get(variable)) and rank == 0:
        Path(file).write_text(text)


def parse_or_resume(argv: list[str], size: int, program: str, ranks_per_node: int) -> tuple[arguments.RunConfig, bool]:
    """(the configuration of a program, whether nothing is left to do).

    After a restart it continues the latest checkpoint of `--save`, if there is one, which may be of the last step.
    """
    config = arguments.parse(argv, size, program, ranks_per_node)
    replaces_a_failed_process = os.environ.get(ATTEMPT, "0") not in ("", "0")
    save = config.settings.save
    if program not in TRAINING.split() or not save or config.check:
        return config, False
    # The memory of several nodes is read before anything is chosen.
    if config.settings.save_memory and (replaces_a_failed_process or config.settings.load):
        from megarl.checkpoint import host_memory
        from megarl.trainers.setup import progress_limit

        host_memory.recover(Path(save), progress_limit(config))
        host_memory.attach(save)
    if not replaces_a_failed_process:
        return config, False
    from megarl.checkpoint import folders, host_memory  # import torch

    try:
        manifest = folders.read_manifest(folders.find(save, "--save"), "--save")
    except UsageError:  # none has been saved yet: start as the first time
        return arguments.parse([*argv, "--overwrite"], size, program, ranks_per_node), False
    if manifest["step"] >= config.settings.train_iters:
        if config.settings.save_memory:
            host_memory.discard(Path(save))
        return config, True
    return arguments.parse([*argv, "--overwrite", "false", "--load", save], size, program, ranks_per_node), False


def finish_report(folder: Path):
    """Draws the report of a run that failed after its last step was saved."""
    from megarl.extras.report import write_report

    write_report(folder)
    print(f"megarl: the last step of {folder} is saved: nothing is left to do", flush=True)
