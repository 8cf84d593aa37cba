"""Guests of a run in forked processes, and what may happen to one of them, each time in the same place."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

import torch

from megarl.generate import Guest
from megarl.mcore.inference import engine
from tests.helpers.processes import free_port
from tests.helpers.waiting import wait_until
from tests.helpers.worlds import die_with_parent, warm

Prepare = Callable[[Path], None]  # changes a guest before it begins; the argument: folder of the run


def has_row(save: Path, step: int) -> bool:
    """Whether a run has written the metrics of a step."""
    file = save / "metrics.jsonl"
    return file.exists() and any(json.loads(line)["step"] >= step for line in file.read_text().splitlines())


def mark_of(save: Path) -> Path:
    """The file that says that the accident has happened."""
    return save.with_name(f"{save.name}-accident")


def at_lease(act: Callable[[Guest, Path], None]) -> Prepare:
    """The accident happens when the guest has leased requests of the second step or a later one."""

    def prepare(save: Path):
        lease = Guest._lease

        def leased(guest, room):
            found = lease(guest, room)
            if found[0] and has_row(save, 1) and not mark_of(save).exists():
                mark_of(save).touch()
                act(guest, save)
            return found

        Guest._lease = leased  # type: ignore[method-assign]

    return prepare


def _signal(number: int) -> Callable[[Guest, Path], None]:
    return lambda guest, save: os.kill(os.getpid(), number)


def _sleep(guest: Guest, save: Path):
    """Does nothing until the step has ended without it, and answers then."""
    assert wait_until(lambda: has_row(save, 2))


def _killed_with_weights(save: Path):
    """Dies when the run is about to send it weights."""
    ask = Guest._ask_for_weights

    def asked(guest):
        pair = ask(guest)
        if pair is not None and has_row(save, 1):
            mark_of(save).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return pair

    Guest._ask_for_weights = asked  # type: ignore[method-assign]


def _killed_with_an_answer(save: Path):
    """Dies when it has all tokens of a response, and has not sent it."""
    answer = Guest._answer

    def answered(guest, number, completion, has_left):
        if has_row(save, 1):
            mark_of(save).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        answer(guest, number, completion, has_left)

    Guest._answer = answered  # type: ignore[method-assign]


def _leaves(save: Path):
    """Gets a signal, and looks after each step whether one has come."""
    engine.POLL_STEPS = 1
    at_lease(_signal(signal.SIGTERM))(save)


def after_the_accident(save: Path):
    """Takes no request of the second step or a later one before the other guest had its accident."""
    lease = Guest._lease

    def leased(guest, room):
        return lease(guest, 0 if has_row(save, 1) and not mark_of(save).exists() else room)

    Guest._lease = leased  # type: ignore[method-assign]


ACCIDENTS: dict[str, Prepare] = {
    "killed": at_lease(_signal(signal.SIGKILL)),
    "killed with an answer": _killed_with_an_answer,
    "killed with weights": _killed_with_weights,
    "stopped": at_lease(_signal(signal.SIGSTOP)),
    "late": at_lease(_sleep),
    "leaves": _leaves,
}


def _run(argv: list[str], save: Path, prepare: Prepare | None, environment: dict[str, str], awaited: Path | None):
    from megarl import generate

    die_with_parent()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ |= environment
    torch.set_num_threads(1)
    if prepare is not None:
        prepare(save)
    assert awaited is None or wait_until(awaited.exists)
    generate.main(argv)
    sys.stdout.flush()
    os._exit(0)


@contextlib.contextmanager
def guests(
    argv: list[str], port: int, save: Path, *prepared: Prepare | None, ranks: int = 1, awaited: Path | None = None
) -> Iterator[list]:
    """Body with guests of a run, one for each of `prepared`, of so many ranks; yields their processes by rank.

    `argv`: of the run; `awaited`: a file, without which the last one does not begin.
    """
    warm()
    processes = []
    try:
        for number, prepare in enumerate(prepared):
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
            is_last = awaited if number == len(prepared) - 1 else None
            for rank in range(ranks):
                own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
                arguments = ["--join", f"127.0.0.1:{port}", *argv], save, prepare, own if ranks > 1 else {}, is_last
                process = get_context("fork").Process(target=_run, args=arguments)
                process.start()
                processes.append(process)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()
