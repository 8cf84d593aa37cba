"""Cost of router replay: seconds of a step without it, with routes of the old log-probs (R2), and of the rollout (R3).

    PYTHONPATH=. python tools/bench/router_replay.py [--steps 12] [--rounds 3] [--ranks 1] [--json FILE] [-- FLAGS …]

Whole runs of megarl.train_rl with the same random weights, prompts and random streams, one kind after the other in each
round; FLAGS are added to each. The first steps of a run are not counted. All kinds generate the same responses in the
first step and similar amounts later. Prints medians over all steps, the median over rounds of the ratio to no replay
within a round (the machine's speed drifts), and the bytes of routes per token.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

KINDS = ("none", "old-logprob", "rollout")
LAYERS, TOPK, WARM_UP = 4, 2, 2  # the first layer is dense
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 4"
    f" --ffn-hidden-size 768 --swiglu --normalization RMSNorm --disable-bias-linear --num-experts 8"
    f" --moe-router-topk {TOPK} --moe-ffn-hidden-size 384 --moe-layer-freq [0]+[1]*{LAYERS - 1}"
    " --make-vocab-size-divisible-by 32 --max-prompt-length 16 --max-response-length 48 --prompts-per-step 16"
    " --samples-per-prompt 4 --minibatch-size 32 --ppo-epochs 2 --advantage grpo --lr 1e-5 --rollout-buffer-gb 0.1"
)


def make_inputs(folder: Path):
    """Makes prompts and a tokenizer."""
    tools = Path(__file__).parents[1]
    commands = [
        ["make_prompts.py", "--task", "basic_arithmetic", "--train", "200", "--heldout", "10", "--seed", "1",
         "--out", str(folder), "--task-option", "max_terms=2", "--task-option", "max_digits=2"],
        ["train_tokenizer.py", "--input", str(folder / "train.jsonl"), "--vocab-size", "64",
         "--out", str(folder / "tokenizer")],
    ]  # fmt: skip
    for name, *arguments in commands:
        subprocess.run([sys.executable, str(tools / name), *arguments], check=True, capture_output=True)


def step_seconds(folder: Path, kind: str, args: argparse.Namespace) -> list[float]:
    """Seconds of each step of a run after the warm-up steps."""
    save = folder / "run"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks), "-m",
        "megarl.train_rl", *FLAGS.split(), "--prompts", str(folder / "train.jsonl"), "--tokenizer-model",
        str(folder / "tokenizer.model"), "--reward", "reasoning-gym", "--train-iters", str(WARM_UP + args.steps),
        "--save", str(save), "--overwrite", "--router-replay", kind, *args.flags,
    ]  # fmt: skip
    threads = str(max(1, (os.cpu_count() or 1) // args.ranks))
    done = subprocess.run(command, env={"OMP_NUM_THREADS": threads, **os.environ}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return [row["time/step_s"] for row in rows[WARM_UP:]]


def measure(args: argparse.Namespace) -> dict:
    """Runs all kinds; returns medians and ratios to no replay."""
    rounds = {kind: [] for kind in KINDS}  # kind -> seconds of the steps of each run
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        for _ in range(args.rounds):
            for kind in KINDS:
                rounds[kind].append(step_seconds(folder, kind, args))
    medians = {kind: [statistics.median(steps) for steps in found] for kind, found in rounds.items()}
    ratios = {
        kind: statistics.median(mine / none for mine, none in zip(found, medians["none"], strict=True))
        for kind, found in medians.items()
    }
    return {
        "step_s": {kind: statistics.median(sum(found, [])) for kind, found in rounds.items()},
        "ratio": ratios,
        "rounds_s": medians,
        "bytes_per_token": 2 * TOPK * (LAYERS - 1),
        "ranks": args.ranks,
    }


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each run; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind; default: %(default)s")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each run; default: %(default)s")
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("flags", nargs="*", help="flags of megarl.train_rl, after --")
    args = parser.parse_args()
    found = measure(args)
    for kind in KINDS:
        print(f"{kind:12} {found['step_s'][kind]:8.3f} s per step   ratio {found['ratio'][kind]:.3f}")
    print(f"routes: {found['bytes_per_token']} bytes per token")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
