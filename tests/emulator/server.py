"""Forks programs on emulated devices: `[name, argv, ranks, folder]` on a line in, their exit statuses on a line out.

`name`: a program of megarl, "planted" for a function of `faults.py`, or "weights" for train_rl with a fault of
`weight_faults.py`.
"""

import importlib
import json
import os
import socket
import sys
from multiprocessing import connection, get_context
from pathlib import Path

import operators  # type: ignore[import-not-found]

from megarl.extras import report
from tests.emulator import device, faults, weight_faults
from tests.helpers import forked_programs, worlds


def main():
    """Answers until the input ends."""
    device.install()
    worlds.warm()
    importlib.import_module("torch.nn.attention.varlen")  # of which each rank would define the operators
    report.write_report = lambda folder: None  # type: ignore[assignment]
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), file=answers, flush=True)


def run(name: str, argv: list[str], ranks: int, folder: str) -> list[int]:
    """Exit statuses by rank; if one fails, the others are killed. Output goes to a folder for each rank."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        own = Path(folder, str(rank))
        own.mkdir()
        (own / "err").touch()  # which a rank that is killed at once would not make
        processes.append(get_context("fork").Process(target=_rank, args=(name, argv, rank, ranks, port, own)))
        processes[-1].start()
        (own / "pid").write_text(str(processes[-1].pid))
    waiting = {process.sentinel: process for process in processes}
    while waiting:
        ready = connection.wait(list(waiting), timeout=worlds.SAFETY_SECONDS)
        ended = [waiting.pop(sentinel) for sentinel in ready]
        for process in ended:
            process.join()
        if not ended or any(process.exitcode for process in ended):
            for process in waiting.values():
                process.kill()
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def _rank(name: str, argv: list[str], rank: int, ranks: int, port: int, folder: Path):
    worlds.die_with_parent()
    forked_programs.redirect(folder)
    device.start()
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if name == "planted":
        faults.run(*argv, variables)
    elif name == "weights":
        weight_faults.run(argv[0], argv[1:], variables)
    else:
        forked_programs.run_here(name, argv, variables)
    (folder / "counts").write_text(json.dumps(operators.counts()))


if __name__ == "__main__":
    main()
