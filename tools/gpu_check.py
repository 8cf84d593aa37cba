"""Runs the stages of a GPU check, each in a process with a time limit of its own: see tools/gpu_check.sh."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from megarl.errors import ArgumentParser, UsageError
from tools.gpu import SIZES, command, learn, program_rows, programs

ROOT = Path(__file__).parent.parent
SLOWER = 30  # an emulated device
TRAVELS, LARGEST = ("packages", "gpu_programs", "warm_start", "nccl"), 48  # of build/ to a machine; MiB at most
STAGES = {  # name -> (seconds at most, module and its flags)
    "versions": (20, ["tools.gpu.versions"]),
    "kernels": (60, ["tools.gpu.kernels"]),
    "decode": (160, ["tools.gpu.decode"]),
    "difference": (60, ["tools.gpu.difference"]),
    "gap": (50, ["tools.gpu.gap"]),
    "update": (110, ["tools.gpu.update"]),
    "ppo": (150, ["tools.gpu.ppo"]),
    "programs": (250, ["tools.gpu.programs"]),
    "tests": (240, ["pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/gpu"]),
    "decode-graphs": (60, ["tools.gpu.decode", "--graphs-only", "1.7 B", "experts"]),
    "update-launches": (50, ["tools.gpu.update", "4096 tokens", "8192 tokens", "experts, 8192 tokens"]),
    "ranks-nccl": (105, ["tools.gpu.ranks", "--backend", "nccl"]),
    "ranks-staged": (105, ["tools.gpu.ranks", "--backend", "staged", "--not-passed"]),
    "learn": (140, ["tools.gpu.learn"]),
    "exact-decode": (50, ["tools.gpu.decode", "--graphs-only", "1.7 B", "1.7 B, exact", "Hugging Face"]),
    "exact-update": (40, ["tools.gpu.update", "8192 tokens", "8192 tokens, exact"]),
    "ppo-graphs": (60, ["tools.gpu.ppo", "dense", "dense, no graphs", "exact", "offload"]),
}
GROUPS = {  # each a command of less than ten minutes; `short-a` and `short-b` fit into a quarter of an hour
    "short-a": ["versions", "kernels", "update-launches", "decode-graphs", "ranks-nccl", "ranks-staged"],
    "short-b": ["learn", "exact-decode", "exact-update", "ppo-graphs"],
    "whole-a": ["versions", "kernels", "difference", "gap", "update", "decode"],
    "whole-b": ["ppo", "programs"],
    "whole-c": ["ranks-nccl", "ranks-staged", "tests"],
}
GROUPS["short"] = GROUPS["short-a"] + GROUPS["short-b"]
GROUPS["all"] = GROUPS["whole-a"] + GROUPS["whole-b"] + GROUPS["whole-c"]


def main(argv: list[str]) -> int:
    """Runs the stages that the command line names, or all of the whole check."""
    parser = ArgumentParser(prog="gpu_check")
    names = ", ".join([*GROUPS, *STAGES])
    parser.add_argument(
        "stages", nargs="*", metavar="STAGE", default=["all"], help=f"or groups of them: {names}, prepare"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of report.json and the stages' output")
    parser.add_argument("--small", action="store_true", help="small sizes, as an emulated device can do")
    args = parser.parse_args(argv)
    if args.stages == ["prepare"]:
        return prepare(args.small)
    if unknown := [name for name in args.stages if name not in {*STAGES, *GROUPS}]:
        raise UsageError(f"stage {unknown[0]}: allowed are {names}; prepare alone")
    if not torch.cuda.is_available():
        raise UsageError("this machine has no CUDA device that torch can use")
    if args.small:
        os.environ[SIZES] = "small"
    factor = SLOWER if args.small else 1
    args.out.mkdir(parents=True, exist_ok=True)
    report: list[dict] = []
    for name in dict.fromkeys(stage for each in args.stages for stage in GROUPS.get(each, [each])):
        report.append(run_stage(name, args.out, factor))
        (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"gpu_check: {name}: {report[-1]['status']} after {report[-1]['seconds']} s", flush=True)
    return int(any(stage["status"] != "passed" for stage in report))


def run_stage(name: str, out: Path, factor: int = 1) -> dict:
    """Runs a stage; its lines of JSON are its results, also where it fails later. `factor`: of its limit."""
    seconds, (module, *flags) = STAGES[name][0] * factor, STAGES[name][1]
    started, log = time.monotonic(), out / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(command(module, *flags), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                                   start_new_session=True)  # fmt: skip
        try:
            returned = process.wait(seconds)
            status = "passed" if returned == 0 else f"failed with status {returned}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {seconds} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with all programs that it started
        process.wait()
    lines = log.read_text(errors="replace").splitlines()
    results = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    if status == "passed" and not lines:
        status = "failed: it has printed nothing"
    tail = [] if status == "passed" else lines[-30:]
    return {"stage": name, "status": status, "seconds": round(time.monotonic() - started, 1), "results": results,
            "tail": tail}  # fmt: skip


def prepare(is_small: bool) -> int:
    """Makes on a CPU what the stages would else make on the machine with the device; says how large it is. `is_small`:
    for `short` alone."""
    programs.prepare(programs.PREPARED, [f"fp32 {flags}" for flags in program_rows.WORLDS] if is_small else [])
    learn.prepare()
    files = {name: (ROOT / "build" / name).rglob("*") for name in TRAVELS}
    sizes = {
        name: sum(file.stat().st_size for file in found if file.is_file()) / 2**20 for name, found in files.items()
    }
    for name, size in sizes.items():
        print(f"gpu_check: build/{name}: {size:.1f} MiB")
    if (total := sum(sizes.values())) > LARGEST:
        raise UsageError(
            f"these folders have {total:.1f} MiB, and {LARGEST} may travel: remove what the check can do without"
        )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        sys.exit(2)
