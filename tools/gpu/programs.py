"""Programs of `program_rows` on the device and on a CPU, two steps each, and what differs.

In fp32 the device must draw the same tokens and find the same numbers as the CPU, up to rounding; in bf16 the gap
between log-probs of rollout and training must be small. Programs are forks of one process that has imported
everything, several at a time. What the CPU finds may be made before, on another machine, which leaves a check's time
and processors to the device: `python -m tools.gpu.programs --prepare build/gpu_programs`.
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tools.gpu import report, run_all

ROOT = Path(__file__).parent.parent.parent
PREPARED = ROOT / "build" / "gpu_programs"
SECONDS = 100  # of one program at most
BEGIN = 130  # seconds after which no further program of the device begins
LEAST_COMPARED = 41  # programs, unless some are chosen
TOLERANCE, GAP = 2e-3, 0.05  # relative, of a number in fp32; nats, in bf16
ABSOLUTE = 1e-4  # of numbers near 0
NUMBERS = ("reward/mean", "actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "kl/reference",
           "rollout/entropy", "sft/loss", "sft/grad_norm", "preference/loss", "preference/grad_norm",
           "reward/loss", "reward/grad_norm")  # fmt: skip


# -- programs of one device, in a process of their own -------------------------------------------------------------


def _child(program: str, argv: list[str], place: Path):
    from tests.helpers import forked_programs

    place.mkdir(parents=True)
    forked_programs.redirect(place)
    forked_programs.run_here(program, argv, {})


def run_programs(folder: Path, data: Path, is_cpu: bool, at_once: int, only: list[str], begin: float):
    """Runs the programs of a device; appends to `folder/statuses.jsonl` the name, exit status, place and last errors
    of each that has ended."""
    import torch

    from megarl import train_rl  # noqa: F401  imported once, before the forks
    from megarl.mcore.model import gpt  # noqa: F401
    from tests.helpers import programs as small
    from tools.gpu import program_rows

    small.inputs = lambda: data  # type: ignore[assignment]  # training it would start CUDA here
    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA has started in the process that forks the programs")
    rows = program_rows.rows(is_cpu)
    waiting = [name for name in rows if not only or any(text in name for text in only)]
    running: list[tuple] = []
    began = time.monotonic()
    with (folder / "statuses.jsonl").open("w") as file:

        def end(*row):
            print(json.dumps(row), file=file, flush=True)

        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                if time.monotonic() - began > begin:
                    end(name, None, None, "")
                    continue
                program, command = rows[name]
                place = folder / str(len(waiting))
                arguments = program, command(place / "run"), place
                process = multiprocessing.get_context("fork").Process(target=_child, args=arguments)
                process.start()
                running.append((name, place, process, time.monotonic()))
            for name, place, process, started in list(running):
                if process.is_alive() and time.monotonic() - started < SECONDS:
                    continue
                process.kill()
                process.join()
                running.remove((name, place, process, started))
                log = place / "err"
                text = log.read_text()[-1500:] if log.exists() else "it has not begun"
                end(name, process.exitcode, place.name, text)
            time.sleep(0.05)


def start(folder: Path, data: Path, is_cpu: bool, at_once: int, only: Iterable[str] = ()) -> subprocess.Popen:
    """Starts a process that runs the programs of a device."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if is_cpu else {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    folder.mkdir(parents=True)
    command = [sys.executable, "-W", "ignore", "-m", "tools.gpu.programs", "--at-once", str(max(at_once, 1))]
    command += [*(token for text in only for token in ("--only", text)), "--run", str(folder), str(data)]
    command += ["--cpu"] * is_cpu
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **hidden})


def make_data(folder: Path):
    """Makes what the programs read and is not there, in a process without the device."""
    script = "import pathlib, sys; from tools.gpu.program_rows import make_data; make_data(pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-W", "ignore", "-c", script, str(folder)]
    subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True)


def prepare(folder: Path, only: list[str]):
    """Writes the programs' data, and what this machine's CPU finds, without checkpoints."""
    shutil.rmtree(folder, ignore_errors=True)
    make_data(folder / "data")
    start(folder / "cpu", folder / "data", True, os.cpu_count() or 1, only).wait()
    shutil.rmtree(folder / "data" / "hf")  # a check makes it again: the same weights
    for place in (folder / "cpu").glob("*/run/*"):
        if place.name not in ("metrics.jsonl", "samples"):
            shutil.rmtree(place) if place.is_dir() else place.unlink()
    statuses = statuses_of(folder / "cpu")
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


def check(only: list[str]) -> bool:
    """Runs all programs; False if one is at fault."""
    is_prepared = PREPARED.is_dir()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, cores = PREPARED if is_prepared else folder, os.cpu_count() or 1
        data, on_cpu = source / "data", source / "cpu"
        make_data(data)
        if is_prepared:
            started = [start(folder / "device", data, False, cores + cores // 4, only)]
        else:
            shares = ((on_cpu, True, cores * 3 // 8), (folder / "device", False, cores * 13 // 16))
            started = [start(place, data, is_cpu, count, only) for place, is_cpu, count in shares]
        for process in started:
            process.wait()
        cpu, on_device = statuses_of(on_cpu), statuses_of(folder / "device")
        found = {name: compare(name, status, cpu.get(name)) for name, status in on_device.items()}
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
    parser.add_argument("--run", type=Path, nargs=2, metavar=("FOLDER", "DATA"), help=argparse.SUPPRESS)
    parser.add_argument("--at-once", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--cpu", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prepare:
        prepare(args.prepare, args.only)
    elif args.run:
        folder, data = args.run
        run_programs(folder, data, args.cpu, args.at_once, args.only, math.inf if args.cpu else BEGIN)
    else:
        run_all({"programs": lambda: check(args.only)})


if __name__ == "__main__":
    main()
