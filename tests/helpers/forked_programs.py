"""Programs in forks of the test process, without a launcher: exit status and output, of wrong input above all."""

import atexit
import functools
import gc
import os
import socket
import sys
import tempfile
import traceback
from multiprocessing import Pipe, get_context
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers import worlds
from tests.helpers.worlds import SAFETY_SECONDS

Ended = tuple[int, str, str]  # exit status, standard output, standard error


def _main_functions() -> dict:
    """Main function by program."""
    from megarl import evaluate, serve, train_preference, train_reward, train_rl, train_sft

    programs = {"rl": train_rl, "sft": train_sft, "reward": train_reward, "preference": train_preference}
    main_functions = {name: module.train for name, module in programs.items()}
    return main_functions | {"evaluate": evaluate.evaluate, "serve": serve.serve}


def redirect(folder: Path):
    """Gives this process its own, empty output files in `folder`."""
    for descriptor, file in ((1, "out"), (2, "err")):
        opened = os.open(folder / file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)


def run_here(name: str, argv: list[str], variables: dict[str, str]):
    """Runs a program; it ends as its process would, by SystemExit or `os._exit`."""
    os.environ.update(variables)
    sys.argv = [name, *argv]
    from megarl.trainers import launch as launch_module

    try:
        launch_module.launch(_main_functions()[name], name)
    except Exception:
        traceback.print_exc()
        raise


def variables_of_ranks(size: int) -> list[dict[str, str]]:
    """What a launcher would set for each rank of a world on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(size)]


def _variables(rank: int, size: int) -> dict[str, str]:
    if size == 1:
        return {}
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}


def _printed(folder: Path) -> tuple[str, str]:
    return (folder / "out").read_text(), (folder / "err").read_text()


# -- a process for each program ----------------------------------------------------------------------------------


def _child(folder: Path, *program):
    redirect(folder)
    run_here(*program)


def launch(folder: Path, argv: list[str], name: str = "rl", rank: int = 0, size: int = 1) -> Ended:
    """Exit status, standard output and standard error of a program in a fork of this process, without a launcher.

    With `size` above 1 the program expects ranks that do not exist, so it would hang or fail in any collective.
    """
    worlds.warm()
    process = get_context("fork").Process(target=_child, args=(folder, name, argv, _variables(rank, size)))
    process.start()
    process.join(SAFETY_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        pytest.fail(f"still running after {SAFETY_SECONDS:g} s: {(folder / 'err').read_text()}")
    return process.exitcode, *_printed(folder)


def error_line(result: Ended) -> str:
    """The one line of an error."""
    status, out, err = result
    assert status == 2, err
    assert out == ""
    assert err.startswith("megarl: error: ") and err.endswith("\n") and err.count("\n") == 1, err
    return err


# -- one process for the checks of many programs -----------------------------------------------------------------


class _Checker:
    """A fork that runs the checks of one program after another, and ends when one goes on to its work."""

    def __init__(self, folder: Path):
        self.folder, context = folder, get_context("fork")
        self._end, other = Pipe()
        self.process = context.Process(target=self._serve, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def _serve(self, end):
        self._end.close()
        worlds.die_with_parent()
        gc.disable()  # each program would collect the garbage of all imports
        environment = dict(os.environ)
        dist.rendezvous = dist.init_process_group = _work_begins  # ranks would wait for each other in the first
        for place, program in iter(end.recv, None):
            redirect(self.folder)
            os.chdir(place)
            os.environ.clear()
            os.environ.update(environment)
            try:
                run_here(*program)
                status = 0
            except SystemExit as error:
                status = error.code or 0
            sys.stdout.flush()
            sys.stderr.flush()
            end.send(status)

    def check(self, *program) -> Ended:
        self._end.send((os.getcwd(), program))  # a test may have gone elsewhere since the fork
        if not self._end.poll(SAFETY_SECONDS):
            self.process.kill()
            pytest.fail(f"no answer after {SAFETY_SECONDS:g} s: {_printed(self.folder)[1]}")
        try:
            status = self._end.recv()
        except EOFError:
            self.process.join()
            _checker.cache_clear()
            status = self.process.exitcode
        return status, *_printed(self.folder)


def _work_begins(*_, **__):
    raise AssertionError("the input is accepted: the work begins")


@functools.cache
def _checker() -> _Checker:
    worlds.warm()
    folder = tempfile.TemporaryDirectory(prefix="megarl-checks-")
    atexit.register(folder.cleanup)
    return _Checker(Path(folder.name))


def check(argv: list[str], name: str = "rl", size: int = 1) -> Ended:
    """As `launch`, for input that must be refused, or with `--check`: a process does this for all tests.

    A program that passes the check fails where it would create the process group: status 1, with a traceback.
    """
    if not _checker().process.is_alive():  # a test has sent signals to all descendants of this process
        _checker.cache_clear()
    status, out, err = _checker().check(name, argv, _variables(0, size))
    # The tests' small folders have tokenizers that transformers' classes change; test_tokenizers_hf has the notice.
    lines = [line for line in err.splitlines(keepends=True) if "its tokenizer.json alone encodes otherwise" not in line]
    return status, out, "".join(lines)


def refusal(argv: list[str], name: str = "rl", size: int = 1) -> str:
    """The line with which a program refuses its input."""
    return error_line(check(argv, name, size))


def accepted(argv: list[str], name: str = "rl", size: int = 1) -> list[str]:
    """The lines with which a program says what it understood of input that is valid, for `--check`."""
    status, printed, others = check([*argv, "--check"], name, size)
    head, *rows = printed.splitlines() or [""]
    assert (status, others) == (0, "") and head == f"megarl: all input is valid for {size} rank{'s' * (size > 1)}"
    return rows
