"""Programs in a fork of the test process, without a launcher: exit status and output of wrong input."""

import os
import sys
import traceback
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.helpers.worlds import SAFETY_SECONDS


def _main_functions() -> dict:
    """Main function by program."""
    from megarl import evaluate, serve, train_reward, train_rl, train_sft

    programs = {"rl": train_rl.train, "sft": train_sft.train, "reward": train_reward.train}
    return programs | {"evaluate": evaluate.evaluate, "serve": serve.serve}


def _child(folder: Path, name: str, argv: list[str], variables: dict):
    """Becomes the program: its own output files, environment and command line."""
    for descriptor, file in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.environ.update(variables)
    sys.argv = [name, *argv]
    from megarl.trainers import launch as launch_module

    try:
        launch_module.launch(_main_functions()[name], name)
    except Exception:
        traceback.print_exc()
        raise


def launch(folder: Path, argv: list[str], name: str = "rl", rank: int = 0, size: int = 1) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a program in a fork of this process, without a launcher.

    With `size` above 1 the program expects ranks that do not exist, so it would hang or fail in any collective.
    """
    _main_functions()  # imported once, before the fork

    variables = {"RANK": str(rank), "WORLD_SIZE": str(size)} if size > 1 else {}
    process = get_context("fork").Process(target=_child, args=(folder, name, argv, variables))
    process.start()
    process.join(SAFETY_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        pytest.fail(f"still running after {SAFETY_SECONDS:g} s: {(folder / 'err').read_text()}")
    return process.exitcode, (folder / "out").read_text(), (folder / "err").read_text()


def error_line(result: tuple[int, str, str]) -> str:
    """The one line of an error."""
    status, out, err = result
    assert status == 2, err
    assert out == ""
    assert err.startswith("megarl: error: ") and err.endswith("\n") and err.count("\n") == 1, err
    return err
