"""Forks programs on emulated devices: `[name, argv, ranks, backend, folder]` on a line in, their exit statuses on a
line out.

`name`: a program of megarl, "planted" for a function of `faults.py`, or "weights" for train_rl with a fault of
`weight_faults.py`. `backend`: nccl, or staged (`tools/gpu/staged.py`).
"""

import importlib
import json
import os
import sys
from multiprocessing import connection, get_context
from pathlib import Path

import operators  # type: ignore[import-not-found]

from megarl.extras import report
from tests.emulator import device, faults, weight_faults
from tests.helpers import forked_programs, worlds
from tools.gpu import staged


def main():
    """Answers until the input ends."""
    device.install()
    staged.register()
    worlds.warm()
    importlib.import_module("torch.nn.attention.varlen")  # of which each rank would define the operators
    report.write_report = lambda folder: None  # type: ignore[assignment]
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        print(json.dumps(run(*json.loads(line))), file=answers, flush=True)


def run(name: str, argv: list[str], ranks: int, backend: str, folder: str) -> list[int]:
    """Exit statuses by rank; if one fails, the others are killed. Output goes to a folder for each rank."""
    from megarl.mcore.device import BACKEND  # which asks for a device: not before it is emulated

    processes = []
    for rank, variables in enumerate(forked_programs.variables_of_ranks(ranks)):
        if backend != "nccl":
            variables[BACKEND] = backend
        own = Path(folder, str(rank))
        own.mkdir()
        (own / "err").touch()  # which a rank that is killed at once would not make
        processes.append(get_context("fork").Process(target=_rank, args=(name, argv, variables, own)))
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


def _rank(name: str, argv: list[str], variables: dict[str, str], folder: Path):
    worlds.die_with_parent()
    forked_programs.redirect(folder)
    if name == "planted":
        faults.run(*argv, variables)
    elif name == "weights":
        weight_faults.run(argv[0], argv[1:], variables)
    else:
        forked_programs.run_here(name, argv, variables)
    (folder / "counts").write_text(json.dumps(operators.counts()))


if __name__ == "__main__":
    main()
