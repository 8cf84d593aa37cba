"""Programs of `program_rows` on the device and on a CPU, two steps each, and what differs.

In fp32 the device must draw the same tokens and find the same numbers as the CPU, up to rounding; in bf16 the gap
between log-probs of rollout and training must be small. Programs are forks of one process that has imported
everything, several at a time. What the CPU finds may be made before, on another machine, which leaves a check's time
and processors to the device: `python -m tools.gpu.programs --prepare build/gpu_programs`.
"""

import argparse
import contextlib
import faulthandler
import importlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import typing
from pathlib import Path

from tools.gpu import command, report, run_all, without_device

ROOT = Path(__file__).parent.parent.parent
PREPARED = ROOT / "build" / "gpu_programs"
STACK = "(most recent call first)"  # of a rank that runs too long
LEAST_COMPARED = 41  # programs, unless some are chosen
TOLERANCE, GAP = 2e-3, 0.05  # relative, of a number in fp32; nats, in bf16
ABSOLUTE = 1e-4  # of numbers near 0
NUMBERS = ("reward/mean", "actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "kl/reference",
           "rollout/entropy", "sft/loss", "sft/grad_norm", "preference/loss", "preference/grad_norm",
           "reward/loss", "reward/grad_norm")  # fmt: skip


# -- programs of one device, in a process of their own -------------------------------------------------------------


class Limits(typing.NamedTuple):
    """How programs of a device run."""

    at_once: int
    begin: float  # seconds after which no further program begins
    seconds: float = 100  # of one program


def _child(program: str, argv: list[str], variables: dict[str, str], place: Path):
    from tests.helpers import forked_programs

    place.mkdir(parents=True)
    forked_programs.redirect(place)
    faulthandler.register(signal.SIGUSR2, all_threads=False)  # who runs too long says where it is
    forked_programs.run_here(program, argv, variables)


def _fork(program: str, argv: list[str], ranks: int, place: Path) -> list:
    """The processes of a program, whose output goes to a folder of each rank."""
    from tests.helpers import forked_programs

    variables = forked_programs.variables_of_ranks(ranks) if ranks > 1 else [{}]
    fork = multiprocessing.get_context("fork").Process
    processes = [fork(target=_child, args=(program, argv, variables[rank], place / str(rank))) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def _last_of(log: Path) -> str:
    """The last errors, or the top of the stack."""
    text = log.read_text() if log.exists() else "it has not begun"
    return text[-1500:] if STACK not in text else text[text.rindex(STACK) :][:1500]


def _end(processes: list, place: Path, is_late: bool) -> tuple[int, str]:
    """Ends the ranks that still run; exit status of a program, and the last errors of the ranks that failed, not of
    those that waited for them."""
    statuses = [process.exitcode for process in processes]
    logs = [place / str(rank) / "err" for rank in range(len(processes))]
    late = [number for number, status in enumerate(statuses) if status is None and is_late and logs[number].exists()]
    for number in late:
        os.kill(processes[number].pid, signal.SIGUSR2)
    for _ in range(50):
        if all(STACK in logs[number].read_text() for number in late):
            break
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.join()
    failed = [logs[number] for number, status in enumerate(statuses) if status or (status is None and is_late)]
    texts = ["it ran longer than its limit"] * is_late + [_last_of(log) for log in failed]
    return next(filter(None, statuses), -signal.SIGKILL if is_late else 0), "\n".join(texts)


def run_programs(rows: dict[str, tuple], folder: Path, only: list[str], limits: Limits):
    """Runs the programs of a device; appends to `folder/statuses.jsonl` the name, exit status, place and last errors
    of each that has ended."""
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA has started in the process that forks the programs")
    waiting = [name for name in rows if not only or any(text in name for text in only)]
    running: list[tuple] = []
    began = time.monotonic()
    with (folder / "statuses.jsonl").open("w") as file:

        def end(*row):
            print(json.dumps(row), file=file, flush=True)

        while waiting or running:
            while waiting and len(running) < limits.at_once:
                name = waiting.pop(0)
                if time.monotonic() - began > limits.begin:
                    end(name, None, None, "")
                    continue
                program, command, ranks = rows[name]
                place = folder / str(len(waiting))
                processes = _fork(program, command(place / "run"), ranks, place)
                running.append((name, place, processes, time.monotonic()))
            for each in list(running):
                name, place, processes, started = each
                statuses = [process.exitcode for process in processes]
                is_late = None in statuses and time.monotonic() - started > limits.seconds
                if is_late or any(statuses) or None not in statuses:
                    running.remove(each)
                    status, text = _end(processes, place, is_late)
                    end(name, status, place.name, text)
            time.sleep(0.05)


def run_here(folder: Path, data: Path, kind: str, only: list[str], limits: Limits):
    """Runs the programs of a kind: `programs` or `worlds`; of the CPU, where the device is hidden."""
    import torch

    from tests.helpers import programs as small
    from tests.helpers import worlds
    from tools.gpu import program_rows, staged

    for name in (*worlds.LATE_IMPORTS, "megarl.mcore.model.gpt", "torch.nn.attention.varlen"):
        with contextlib.suppress(ImportError):  # of a package that the machine lacks
            importlib.import_module(name)  # once, before the forks
    staged.register()
    os.environ[small.INPUTS] = str(data)  # training what it has would start CUDA here
    rows = getattr(program_rows, "rows" if kind == "programs" else kind)(not torch.cuda.is_available())
    run_programs(rows, folder, only, limits)


def start(folder: Path, data: Path, is_cpu: bool, limits: Limits, kind: str, only: list[str]) -> subprocess.Popen:
    """Starts a process that runs the programs of a device."""
    environment = without_device() if is_cpu else {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    environment["OMP_NUM_THREADS"] = "1"
    folder.mkdir(parents=True)
    flags = [f"--only={text}" for text in only]
    flags += ["--run", str(folder), str(data), kind, "--limits", *map(str, limits)]
    return subprocess.Popen(command("tools.gpu.programs", *flags, through=not is_cpu), env=environment)


def make_data(folder: Path, kind: str):
    """Makes what the programs of a kind read and is not there, in a process without the device."""
    script = "import pathlib, sys; from tools.gpu.program_rows import make_data; "
    script += "make_data(pathlib.Path(sys.argv[1]), sys.argv[2])"
    maker = [sys.executable, "-W", "ignore", "-c", script, str(folder), kind]
    subprocess.run(maker, env=without_device(), check=True)


def prepare(folder: Path, only: list[str]):
    """Writes the programs' data, and what this machine's CPU finds, without checkpoints."""
    shutil.rmtree(folder, ignore_errors=True)
    make_data(folder / "data", "programs")
    statuses, cores = {}, os.cpu_count() or 1
    for kind, at_once in (("programs", cores), ("worlds", max(1, cores // 2))):
        start(folder / kind, folder / "data", True, Limits(at_once, math.inf), kind, only).wait()
        statuses |= statuses_of(folder / kind)
    shutil.rmtree(folder / "data" / "hf")  # a check makes it again: the same weights
    for place in folder.glob("*/*/run/*"):
        if place.name not in ("metrics.jsonl", "samples"):
            shutil.rmtree(place) if place.is_dir() else place.unlink()
    faults = {name: text for name, (status, _, text) in statuses.items() if status}
    report(prepared=len(statuses), faults=faults)


# -- comparison ----------------------------------------------------------------------------------------------------


def statuses_of(folder: Path) -> dict[str, tuple[int | None, Path, str]]:
    """By program: exit status (None: it was not begun), folder and last errors."""
    rows = [json.loads(line) for line in (folder / "statuses.jsonl").read_text().splitlines()]
    return {name: (status, folder / str(place), text) for name, status, place, text in rows}


def steps_of(place: Path) -> list[dict]:
    """Metrics of each step of a program."""
    rows = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"]]


def texts_of(run: Path) -> list:
    """Prompts and responses of all samples of a run."""
    files = sorted((run / "samples").glob("step_*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(row["prompt"], row["response"]) for row in rows]


def difference(found: list[dict], wanted: list[dict]) -> tuple[float, str]:
    """Largest share of its tolerance that a number differs by, and its name."""
    shares = [(0.0, "")]
    for step, (mine, other) in enumerate(zip(found, wanted, strict=True), 1):
        for name in NUMBERS:
            if (value := mine.get(name)) is not None or other.get(name) is not None:
                limit = TOLERANCE * abs(other[name]) + ABSOLUTE
                share = abs(value - other[name]) / limit
                shares.append((math.inf if math.isnan(share) else share, f"step {step} {name}"))
    return max(shares)


def compare(name: str, on_device: tuple, on_cpu: tuple | None) -> dict:
    """What is wrong with a program, and numbers of it; nothing wrong: no "fault"."""
    status, place, error = on_device
    if status is None:
        return {"waiting": True}
    if status:
        refused = status == 2 and error.count("\n") == 1
        return {"refused" if refused else "fault": error if refused else f"exit status {status}: {error}"}
    steps = steps_of(place)
    gaps = [step.get("rollout/logprob_gap_max", 0.0) for step in steps]
    norms = [value for step in steps for key, value in step.items() if key.endswith("grad_norm")]
    found: dict = {"gap_max": max(gaps), "norms": norms}
    limit = 0.0 if "--exact-rollout" in name else GAP if name.startswith("bf16") else TOLERANCE
    if "--partial-rollouts" not in name and not max(gaps) <= limit:  # there an older policy drew some tokens
        found["fault"] = "gap"
    if on_cpu is not None and on_cpu[0]:
        found["fault"] = f"fails on the CPU: {on_cpu[2]}"
    elif on_cpu is not None:
        found["share"], found["of"] = difference(steps, steps_of(on_cpu[1]))
        found["same_text"] = texts_of(place / "run") == texts_of(on_cpu[1] / "run")
        if found["share"] > 1 or not found["same_text"]:
            found["fault"] = "differs from the CPU"
    return found


def compared(kind: str, only: list[str], limits: Limits) -> dict[str, dict]:
    """Runs the programs of a kind; by name what was found, and what is wrong. `limits.at_once` is that of a device
    whose CPU has nothing else to do, since its part is prepared."""
    is_prepared = (PREPARED / kind).is_dir()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data, on_device, on_cpu = folder / "data", folder / "device", (PREPARED if is_prepared else folder) / kind
        if is_prepared:
            shutil.copytree(PREPARED / "data", data)
        if not is_prepared or kind == "programs":
            make_data(data, kind)
        started = []
        if not is_prepared:
            share = Limits(max(1, limits.at_once // 3), math.inf)
            started, limits = [start(on_cpu, data, True, share, kind, only)], limits._replace(at_once=2 * share.at_once)
        for process in [*started, start(on_device, data, False, limits, kind, only)]:
            process.wait()
        cpu = statuses_of(on_cpu)
        return {name: compare(name, status, cpu.get(name)) for name, status in statuses_of(on_device).items()}


def check(only: list[str]) -> bool:
    """Runs all programs; False if one is at fault."""
    cores = os.cpu_count() or 1
    found = compared("programs", only, Limits(cores + cores // 4, 130))
    return summarise(found, LEAST_COMPARED if not only else 0)


def summarise(found: dict[str, dict], least: int) -> bool:
    """Reports the faults among the programs, and what holds of all; False if one is at fault, or fewer than `least`
    were compared with a CPU's."""
    faults = {name: row for name, row in found.items() if "fault" in row}
    for name, row in faults.items():
        report(program=name, **row)
    refused = {name: row["refused"] for name, row in found.items() if "refused" in row}
    gaps = {kind: max((row.get("gap_max", 0.0) for name, row in found.items() if name.startswith(kind)), default=0)
            for kind in ("fp32", "bf16")}  # fmt: skip
    shares = sorted(((row["share"], name, row["of"]) for name, row in found.items() if "share" in row), reverse=True)
    trained = sum(any(row["norms"]) for row in found.values() if "norms" in row)
    waiting = [name for name, row in found.items() if "waiting" in row]
    report(programs=len(found) - len(waiting), compared=len(shares), trained=trained, faults=len(faults),
           refused=refused, gaps=gaps, largest=shares[:3], not_begun=waiting)  # fmt: skip
    return bool(found) and not faults and len(shares) >= least


def main():
    """The stage, or one of its parts."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.programs", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="programs whose name has this text")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="make data and the CPU's numbers there")
    parser.add_argument("--run", nargs=3, metavar=("FOLDER", "DATA", "KIND"), help=argparse.SUPPRESS)
    parser.add_argument("--limits", nargs=3, type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prepare:
        prepare(args.prepare, args.only)
    elif args.run:
        folder, data, kind = args.run
        run_here(Path(folder), Path(data), kind, args.only, Limits(*args.limits))
    else:
        run_all({"programs": lambda: check(args.only)})


if __name__ == "__main__":
    main()
