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

ROOT = Path(__file__).parent.parent
STAGES = {  # name -> (seconds at most, command after the interpreter)
    "versions": (20, ["-m", "tools.gpu.versions"]),
    "kernels": (60, ["-m", "tools.gpu.kernels"]),
    "decode": (160, ["-m", "tools.gpu.decode"]),
    "difference": (60, ["-m", "tools.gpu.difference"]),
    "gap": (50, ["-m", "tools.gpu.gap"]),
    "update": (110, ["-m", "tools.gpu.update"]),
    "ppo": (150, ["-m", "tools.gpu.ppo"]),
    "programs": (250, ["-m", "tools.gpu.programs"]),
    "tests": (240, ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "tests/gpu"]),
}


def main(argv: list[str]) -> int:
    """Runs the stages that the command line names, or all."""
    parser = ArgumentParser(prog="gpu_check")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; default: all")
    parser.add_argument("--out", type=Path, required=True, help="folder of report.json and the stages' output")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.stages if name not in STAGES]:
        raise UsageError(f"stage {unknown[0]}: allowed are {', '.join(STAGES)}")
    if not torch.cuda.is_available():
        raise UsageError("this machine has no CUDA device that torch can use")
    args.out.mkdir(parents=True, exist_ok=True)
    report: list[dict] = []
    for name in args.stages or STAGES:
        report.append(run_stage(name, args.out))
        (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"gpu_check: {name}: {report[-1]['status']} after {report[-1]['seconds']} s", flush=True)
    return int(any(stage["status"] != "passed" for stage in report))


def run_stage(name: str, out: Path) -> dict:
    """Runs a stage; what it prints last as a line of JSON is its result, also where it fails later."""
    seconds, command = STAGES[name]
    started, log = time.monotonic(), out / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
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
    tail = [] if status == "passed" else lines[-30:]
    return {"stage": name, "status": status, "seconds": round(time.monotonic() - started, 1), "results": results,
            "tail": tail}  # fmt: skip


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UsageError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        sys.exit(2)
