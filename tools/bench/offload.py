"""Memory and time of offload: a step of four colocated roles with and without it, and round trips of a payload.

    PYTHONPATH=. python tools/bench/offload.py [--steps 3] [--payload 256] [--json FILE] [-- FLAGS …]

Whole runs of megarl.train_rl on one rank, FLAGS added to each, with four models of one size; megarl.train_reward makes
the reward model in one step. Prints the device's peak memory in each phase, seconds of a step and of moving, and the
host's memory over the payload. On CUDA, device bytes are those of torch's allocator. On a CPU, device memory is the
process's resident memory, minus that in the same phase of a run with models of a few kB, and minus the host copies of
what moves. Saving is not counted, since its buffers are on the host on every machine.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from megarl.mcore import device
from megarl.observe.timers import Timers

WARM_UP, MIB = 1, 2**20
NOTHING = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --num-query-groups 1 --ffn-hidden-size 16"  # few kB
SIDES = {"none": f"{NOTHING} --rollout-buffer-gb 0.001".split(), "kept": [], "moved": ["--offload"]}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
# Freed buffers of a MiB or more return to the system at once, so resident memory equals allocated memory.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", **os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)}
MODEL = (
    "--num-layers 4 --hidden-size 384 --num-attention-heads 8 --group-query-attention --num-query-groups 4"
    " --ffn-hidden-size 1152 --swiglu --normalization RMSNorm --disable-bias-linear --make-vocab-size-divisible-by 32"
    " --max-prompt-length 16 --max-response-length 16 --max-tokens-per-microbatch 256 --lr 1e-5"
)
STEP = "--prompts-per-step 4 --samples-per-prompt 4 --minibatch-size 8 --rollout-buffer-gb 0.02"


def resident(kind: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, bytes."""
    return int(re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def forget_peak():
    """Resets the peaks of device and host."""
    Path("/proc/self/clear_refs").write_text("5")
    if device.has_cuda():
        torch.cuda.reset_peak_memory_stats()


class Watch(Timers):
    """Timers that also record the peak memory of each phase, in bytes."""

    def __init__(self):
        super().__init__()
        self.peaks, self._inside = {}, []

    @contextlib.contextmanager
    def phase(self, role: str, name: str):
        """Like `Timers.phase`; a nested phase counts for both."""
        self._note()
        self._inside.append(f"{role}/{name}")
        try:
            with super().phase(role, name):
                yield
        finally:
            self._note()
            self._inside.pop()

    def _note(self):
        peak = torch.cuda.max_memory_allocated() if device.has_cuda() else resident("VmHWM")
        for name in self._inside if self.step > WARM_UP else ():
            self.peaks[name] = max(peak, self.peaks.get(name, 0))
        forget_peak()


def run_step(flags: list[str], out: Path):
    """Runs the program in this process; writes the peaks by phase to `out`."""
    from megarl import arguments, train_rl

    watch = Watch()
    train_rl.train(arguments.parse(flags, 1, "rl"), watch)
    torch.distributed.destroy_process_group()
    out.write_text(json.dumps(watch.peaks))


def run_rounds(payload: int, rounds: int = 5) -> dict:
    """Moves four matrices of about `payload` bytes in total; host memory and seconds of each direction."""
    from megarl.mcore import offload

    before = resident("VmRSS")
    forget_peak()
    layers = [torch.nn.Linear(2048, payload // 4 // 4 // 2048, bias=False, device="meta") for _ in range(4)]
    stages = torch.nn.ModuleList(layers).to_empty(device=device.device()).requires_grad_(False)
    for number, weight in enumerate(stages.parameters()):
        weight.fill_(number)
    payload = sum(weight.nbytes for weight in stages.parameters())
    moved, seconds = offload.offload_frozen(stages), []
    for _ in range(rounds):
        marks = [time.perf_counter()]
        with moved.present("weights", changed=True):
            torch.cuda.synchronize()
            marks.append(time.perf_counter())
            for weight in stages.parameters():
                weight.add_(1)
            torch.cuda.synchronize()
            marks.append(time.perf_counter())
        torch.cuda.synchronize()
        seconds.append((marks[1] - marks[0], time.perf_counter() - marks[2]))
    with moved.present("weights"):
        assert [float(weight[-1, -1]) for weight in stages.parameters()] == [rounds + i for i in range(4)]
    on_device = 0 if device.has_cuda() else payload
    return {
        "payload_bytes": payload,
        "host_peak_bytes": resident("VmHWM") - before - on_device,
        "host_away_bytes": resident("VmRSS") - before,
        "arrive_s": statistics.median(arriving for arriving, _ in seconds),
        "leave_s": statistics.median(leaving for _, leaving in seconds),
    }


def make_inputs(folder: Path) -> list[str]:
    """Makes prompts and a tokenizer; returns their flags."""
    tools, prompts = Path(__file__).parents[1], str(folder / "train.jsonl")
    for name, *arguments in (
        ["make_prompts.py", "--task", "basic_arithmetic", "--train", "100", "--heldout", "10", "--seed", "1", "--out",
         str(folder), "--task-option", "max_terms=2", "--task-option", "max_digits=2"],
        ["train_tokenizer.py", "--input", prompts, "--vocab-size", "64", "--out", str(folder / "tokenizer")],
    ):  # fmt: skip
        subprocess.run([sys.executable, str(tools / name), *arguments], check=True, capture_output=True)
    return ["--prompts", prompts, "--tokenizer-model", str(folder / "tokenizer.model")]


def make_reward_model(folder: Path, inputs: list[str], shape: str) -> list[str]:
    """Trains a reward model for one step on right and wrong answers; returns the flags to score with it."""
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    pairs = [{"prompt": r["prompt"], "chosen": r["answer"], "rejected": f"{r['answer']}0"} for r in rows]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    more = ["--prompts", str(folder / "pairs.jsonl"), "--global-batch-size", "4", "--train-iters", "1"]
    save = str(folder / f"reward-model{len(shape)}")
    run_python([*TORCHRUN, "-m", "megarl.train_reward", *shape.split(), *inputs, *more, "--save", save])
    return ["--reward", "model", "--reward-model", save]


def run_python(arguments: list[str]):
    """Runs Python with these arguments; SystemExit with its output if it fails."""
    done = subprocess.run([sys.executable, *arguments], env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def child(command: list[str], *arguments: str, out: Path) -> dict:
    """Runs this file in its own process and returns its result."""
    run_python([*command, __file__, "--out", str(out), *arguments])
    return json.loads(out.read_text())


def measure(args: argparse.Namespace) -> dict:
    """Runs all sides and the round trips, one after the other."""
    found = {"device": device.device().type}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = make_inputs(folder)
        tiny, scored = (make_reward_model(folder, inputs, shape) for shape in (f"{MODEL} {NOTHING}", MODEL))
        for side, flags in SIDES.items():
            save = folder / side
            more = ["--save", str(save), "--train-iters", str(WARM_UP + args.steps), *inputs, *args.flags]
            more += [*flags, *(tiny if side == "none" else scored)]
            command = ["--side", "step", "--", *MODEL.split(), *STEP.split(), *more]
            peaks = child(TORCHRUN, *command, out=folder / f"{side}.json")
            rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
            host_bytes = sum(value for key, value in rows[-1].items() if key.endswith("/offloaded_bytes"))
            found[side] = {
                "peak_bytes": {p: peak for p, peak in peaks.items() if not p.endswith(("/save", "/offload"))},
                "host_bytes": host_bytes,
                "step_s": statistics.median(row["time/step_s"] for row in rows),
                "moving_s": statistics.median(
                    sum(value for key, value in row.items() if key.endswith("/offload_s")) for row in rows
                ),
            }
        base = {} if device.has_cuda() else found["none"]["peak_bytes"]
        for side in ("kept", "moved"):
            host_copies = 0 if device.has_cuda() else found[side]["host_bytes"]
            found[side]["device_peak_bytes"] = {
                phase: peak - base.get(phase, 0) - host_copies for phase, peak in found[side]["peak_bytes"].items()
            }
        found["rounds"] = child([], "--side", "rounds", "--payload", str(args.payload), out=folder / "rounds.json")
    return found


def show(found: dict):
    """Prints the report."""
    kept, moved, rounds = found["kept"], found["moved"], found["rounds"]
    print(f"device ({found['device']}), peak of each phase, MiB{'':15}without    with")
    one, other = kept["device_peak_bytes"], moved["device_peak_bytes"]
    rows = {"all": (max(one.values()), max(other.values()))} | {name: (one[name], other[name]) for name in one}
    for name, (without, with_it) in rows.items():
        print(f"{name:45}{without / MIB:10.1f}{with_it / MIB:8.1f}")
    print(f"host copies, MiB {moved['host_bytes'] / MIB:.1f}")
    print(f"seconds of a step {kept['step_s']:.3f} without, {moved['step_s']:.3f} with; moving {moved['moving_s']:.3f}")
    ratio, size = rounds["host_peak_bytes"] / rounds["payload_bytes"], rounds["payload_bytes"] / 1e9
    print(f"{size:.3f} GB round trips: host peak {ratio:.3f} of it, arrives at {size / rounds['arrive_s']:.2f} GB/s, "
          f"leaves at {size / rounds['leave_s']:.2f} GB/s")  # fmt: skip


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each run; default: %(default)s")
    parser.add_argument("--payload", type=int, default=256, help="MiB of the round trips; default: %(default)s")
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--side", choices=("step", "rounds"), help="run only this measurement, into --out")
    parser.add_argument("--out", type=Path, help="output file of --side")
    parser.add_argument("flags", nargs="*", help="flags of megarl.train_rl, after --")
    args = parser.parse_args()
    if args.side == "step":
        return run_step(args.flags, args.out)
    if args.side == "rounds":
        return args.out.write_text(json.dumps(run_rounds(args.payload * MIB)))
    found = measure(args)
    show(found)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
