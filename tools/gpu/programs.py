"""Two steps of train_rl with each of many flags, on the device and on the CPU of this machine, and what differs.

In fp32 the device must draw the same tokens and find the same numbers as the CPU, up to rounding; in bf16 the gap
between log-probs of rollout and training must be small. Programs are forks of one process that has imported
everything, several at a time.
"""

import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.gpu import report, run_all

ROOT = Path(__file__).parent.parent.parent
AT_ONCE, SECONDS = {"cpu": 6, "device": 13}, 100  # programs; of one of them at most
TOLERANCE, GAP = 2e-3, 0.05  # relative, of a number in fp32; nats, in bf16
ABSOLUTE = 1e-4  # of numbers near 0
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --q-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8"
)
ROUTED = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --router-replay rollout"
MORE = [LATENT, f"{ROUTED} --lora-rank 2", "--use-torch-fsdp2", "--decode-graphs off",
        "--window-size 3,0 --softmax-type learnable --use-distributed-optimizer"]  # fmt: skip
GROUPED = [f"{ROUTED} --moe-grouped-gemm{more}" for more in ("", " --offload", " --use-distributed-optimizer")]
EXACT = ["--exact-rollout", f"{ROUTED} --exact-rollout"]
NUMBERS = ("reward/mean", "actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "kl/reference",
           "rollout/entropy")  # fmt: skip


def flags_of_all() -> tuple[list[str], list[str]]:
    """The flags of each program on one rank: of the algorithm; of the model, its kernels and memory."""
    from tests.helpers import combinations

    agents = "--environment tests.helpers.agents"  # which need a package
    apart = ("--kernels blas", "--exact-rollout", "--verify-weights", "--generation-lag", agents)
    of_model = ("experts", "attention", "model", "optimizer", "recompute", "factors", "memory", "sampling")
    found: tuple[list[str], list[str]] = [], [*combinations.NEUTRAL, *MORE]
    for axis, values in combinations.AXES.items():
        if axis not in ("layout", "precision"):
            found[axis in of_model].extend(values)
    algorithm, model = ([value for value in row if not value.startswith(apart)] for row in found)
    return algorithm, ["", *model]


def programs(is_cpu: bool) -> dict[str, str]:
    """name -> flags of the programs of a device."""
    algorithm, model = flags_of_all()
    rows = {f"fp32 {flags}": flags for flags in [*model, *algorithm]}
    if not is_cpu:
        rows |= {f"bf16 {flags}": f"--bf16 {flags}" for flags in [*EXACT, *GROUPED, *model]}
        rows["fp16"] = "--fp16 --initial-loss-scale 1024"
    return rows


def argv_of(flags: str, save: Path) -> list[str]:
    """The command line of a program."""
    from tests.helpers import combinations
    from tests.helpers import programs as small

    both = f"--train-iters 2 --use-cpu-initialization {small.GRADED}"
    argv = combinations.argv_of([both, flags], save)
    if LATENT in flags:  # which has no groups
        place = argv.index("--group-query-attention")
        del argv[place : place + 3]
    return argv


# -- programs of one device, in a process of their own -------------------------------------------------------------


def _child(argv: list[str], place: Path):
    from tests.helpers import forked_programs

    place.mkdir(parents=True)
    forked_programs.redirect(place)
    forked_programs.run_here("rl", argv, {})


def run_programs(folder: Path, is_cpu: bool):
    """Runs the programs of a device; writes the exit status of each, and why it failed."""
    import torch

    from megarl import train_rl  # noqa: F401  imported once, before the forks
    from megarl.mcore.model import gpt  # noqa: F401
    from tests.helpers import programs as small

    small.inputs = lambda: folder.parent / "data"  # type: ignore[assignment]  # training it would start CUDA here
    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA has started in the process that forks the programs")
    waiting = [*programs(is_cpu).items()]
    running: list[tuple] = []
    statuses = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE["cpu" if is_cpu else "device"]:
            name, flags = waiting.pop(0)
            place = folder / str(len(waiting))
            arguments = argv_of(flags, place / "run")
            process = multiprocessing.get_context("fork").Process(target=_child, args=(arguments, place))
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
            statuses[name] = [process.exitcode, str(place), text]
        time.sleep(0.05)
    (folder / "statuses").write_text(json.dumps(statuses))


def start(folder: Path, is_cpu: bool) -> subprocess.Popen:
    """Starts a process that runs the programs of a device."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if is_cpu else {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-m", "tools.gpu.programs", str(folder), "cpu" * is_cpu]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **hidden})


# -- comparison ----------------------------------------------------------------------------------------------------


def steps_of(place: str) -> list[dict]:
    """Metrics of each step of a program."""
    rows = [json.loads(line) for line in Path(place, "run/metrics.jsonl").read_text().splitlines()]
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


def compare(name: str, on_device: list, on_cpu: list | None) -> dict:
    """What is wrong with a program, and numbers of it; nothing wrong: no "fault"."""
    status, place, error = on_device
    if status:
        refused = status == 2 and error.count("\n") == 1
        return {"refused" if refused else "fault": error if refused else f"exit status {status}: {error}"}
    steps = steps_of(place)
    gaps = [step.get("rollout/logprob_gap_max", 0.0) for step in steps]
    found: dict = {"gap_max": max(gaps), "grad_norms": [step.get("actor/grad_norm") for step in steps]}
    limit = 0.0 if "--exact-rollout" in name else GAP if name.startswith("bf16") else TOLERANCE
    if "--partial-rollouts" not in name and not max(gaps) <= limit:  # there an older policy drew some tokens
        found["fault"] = "gap"
    if on_cpu is not None and on_cpu[0]:
        found["fault"] = f"fails on the CPU: {on_cpu[2]}"
    elif on_cpu is not None:
        found["share"], found["of"] = difference(steps, steps_of(on_cpu[1]))
        found["same_text"] = texts_of(Path(place, "run")) == texts_of(Path(on_cpu[1], "run"))
        if found["share"] > 1 or not found["same_text"]:
            found["fault"] = "differs from the CPU"
    return found


def check() -> bool:
    """Runs all programs; False if one is at fault."""
    with tempfile.TemporaryDirectory() as folder:
        make_data = "import shutil; from tests.helpers.programs import inputs; shutil.copytree(inputs(), %r)"
        command = [sys.executable, "-W", "ignore", "-c", make_data % str(Path(folder, "data"))]
        subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True)
        folders = {is_cpu: Path(folder, "cpu" if is_cpu else "device") for is_cpu in (True, False)}
        for started in [start(place, is_cpu) for is_cpu, place in folders.items()]:
            started.wait()
        cpu, on_device = (json.loads((folders[is_cpu] / "statuses").read_text()) for is_cpu in (True, False))
        found = {name: compare(name, status, cpu.get(name)) for name, status in on_device.items()}
        faults = {name: row for name, row in found.items() if "fault" in row}
        for name, row in faults.items():
            report(program=name, **row)
        refused = {name: row["refused"] for name, row in found.items() if "refused" in row}
        gaps = {kind: max((row.get("gap_max", 0.0) for name, row in found.items() if name.startswith(kind)), default=0)
                for kind in ("fp32", "bf16")}  # fmt: skip
        shares = sorted(
            ((row["share"], name, row["of"]) for name, row in found.items() if "share" in row), reverse=True
        )
        report(programs=len(found), compared=len(shares), faults=len(faults), refused=refused, gaps=gaps,
               largest=shares[:3])  # fmt: skip
        return not faults and len(shares) > 40


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_programs(Path(sys.argv[1]), bool(sys.argv[2]))
    else:
        run_all({"programs": check})
