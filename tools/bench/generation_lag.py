"""Generation that runs ahead: seconds of a step for several `--generation-lag`, beside a model of two queues.

    PYTHONPATH=. python tools/bench/generation_lag.py [--steps 24] [--lags 0,1,2,4] [--spread 0.6] [--json FILE]
        [--markdown]

Whole runs of megarl.train_rl with a tiny model on two ranks: one generates, one trains. Both sleep most of the time, so
that two cores are enough: episodes wait for a tool, and a reward on the trained rank takes as long on average. The
tool's times depend on the prompt alone, so all runs wait equally long; `--spread` is their coefficient of variation.
together: both ranks generate, then both train.

The model gets the generation time g and the training time t of each step of the run without lag: a batch is generated
when the one before is done and the weights of `lag` + 1 steps before are there, and trained on when it is there and the
last one is done.
"""

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from megarl.data.order import PromptOrder
from megarl.environments.protocol import BaseEnvironment, Observation, Task, Turn
from megarl.rewards.base import Sample
from tools.bench import common
from tools.bench.overlap import run_python

PROMPTS, SAMPLES, WARM_UP = 4, 2, 6
TOOL, REWARD = 0.6, 0.6  # mean seconds of a step's longest tool call, and of its rewards together
APART = "--role-map actor=0;reward=0;rollout=1"
TOGETHER = "--role-map actor=0-1;reward=0-1"
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --make-vocab-size-divisible-by 8 --max-prompt-length 12"
    " --max-response-length 4 --max-tokens-per-microbatch 200 --rollout-buffer-gb 0.001 --rollout-max-requests 16"
    " --advantage grpo --kl-coefficient 0 --lr 1e-5 --rollout-correction tis --environment-workers 1"
    f" --prompts-per-step {PROMPTS} --samples-per-prompt {SAMPLES} --max-turn-length 4 --max-turns 1 --seed 3"
    " --environment tools.bench.generation_lag:SlowTool --reward tools.bench.generation_lag:slow_reward"
)


class SlowTool(BaseEnvironment):
    """Ends an episode after as many seconds as its prompt says."""

    def reset(self, task: Task) -> Observation:
        """Reads the seconds."""
        self._seconds = task.metadata["seconds"]
        return Observation()

    async def step(self, turn: Turn) -> Observation:
        """Waits without a core."""
        await asyncio.sleep(self._seconds)
        return Observation(reward=0.0, done=True)


def slow_reward(sample: Sample) -> float:
    """Waits for its share of a step's rewards."""
    time.sleep(REWARD / (PROMPTS * SAMPLES))
    return len(sample.response) / 10


def write_prompts(folder: Path, steps: int, spread: float) -> list[str]:
    """Prompts whose tools take log-normal times, the same for those that are drawn together; returns their flags."""
    rng, sigma = random.Random(1), math.sqrt(math.log(1 + spread * spread))
    rows, order = [{}] * (steps * PROMPTS), PromptOrder(steps * PROMPTS, 3)
    for _ in range(steps):
        seconds = TOOL * math.exp(sigma * rng.gauss(0, 1) - sigma * sigma / 2)
        for line in order.take(PROMPTS):
            rows[line] = {"prompt": f"{line % 100}+1=", "answer": "1", "metadata": {"seconds": seconds}}
    file, tokenizer = folder / "prompts.jsonl", folder / "tokenizer"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_python(["tools/train_tokenizer.py", "--input", str(file), "--vocab-size", "20", "--out", str(tokenizer)])
    return ["--prompts", str(file), "--tokenizer-model", f"{tokenizer}.model"]


def run(flags: list[str], save: Path) -> list[dict[str, float]]:
    """The metrics of each step of a run on two ranks."""
    run_python(["-m", "megarl.launcher", "--nproc-per-node", "2", "train_rl", *flags, "--save", str(save)])
    return [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]


def seconds_of(row: dict[str, float]) -> float:
    """Seconds between the ends of a step and of the one before on the rank that trains."""
    return row["perf/tokens"] / row["perf/tokens_per_s"]


def predicted(g: list[float], t: list[float], lag: int) -> list[float]:
    """Seconds of each step by the model."""
    generated, trained = [0.0], [0.0]
    for i, (generation, training) in enumerate(zip(g, t, strict=True), start=1):
        weights = trained[i - 1 - lag] if i - 1 - lag > 0 else 0.0
        generated.append(max(generated[-1], weights) + generation)
        trained.append(max(trained[-1], generated[-1]) + training)
    return [after - before for before, after in itertools.pairwise(trained)]


def measure(args: argparse.Namespace) -> dict:
    """Runs all sides once, one after another."""
    with tempfile.TemporaryDirectory() as name:
        folder, sides = Path(name), {}
        flags = [*write_prompts(folder, args.steps, args.spread), *FLAGS.split(), "--train-iters", str(args.steps)]
        rows = {f"lag {lag}": run([*flags, *APART.split(), "--generation-lag", str(lag)], folder / f"{lag}")
                for lag in args.lags}  # fmt: skip
        rows["together"] = run([*flags, *TOGETHER.split()], folder / "together")
    g = [row["time/rollout/rollout_s"] for row in rows["lag 0"]]
    t = [seconds_of(row) - generation for row, generation in zip(rows["lag 0"], g, strict=True)]
    for side, of_steps in rows.items():
        model = predicted(g, t, int(side.split()[1])) if side != "together" else None
        sides[side] = {
            "step_s": statistics.fmean(map(seconds_of, of_steps[WARM_UP:])),
            "predicted_s": model and statistics.fmean(model[WARM_UP:]),
            "staleness": of_steps[-1].get("rollout/staleness", 0),
        }
    return {"case": "generation_lag", "steps": args.steps, "spread": args.spread, "generation_s": statistics.fmean(g),
            "training_s": statistics.fmean(t), "sides": sides}  # fmt: skip


def table(found: dict, markdown: bool) -> str:
    """A line per side: seconds of a step, the model's, their ratio, and how much faster it is than without lag."""
    lines = [["side", "s a step", "model", "ratio", "speed"]]
    base = found["sides"]["lag 0"]["step_s"]
    for name, side in found["sides"].items():
        model = side["predicted_s"]
        prediction = ["", ""] if model is None else [f"{model:.3f}", f"{side['step_s'] / model:.2f}"]
        lines.append([name, f"{side['step_s']:.3f}", *prediction, f"{base / side['step_s']:.2f}"])
    if markdown:
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return "\n".join("  ".join(cell.rjust(9) for cell in cells) for cells in lines)


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=24, help=f"steps of each run, above {WARM_UP}")
    parser.add_argument("--lags", default="0,1,2,4", help="lags, separated by commas; 0 always runs")
    parser.add_argument("--spread", type=float, default=0.6, help="coefficient of variation of the tool's times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    parser.add_argument("--markdown", action="store_true", help="print rows of a Markdown table")
    args = parser.parse_args()
    args.lags = sorted({0, *map(int, args.lags.split(","))})
    if args.steps <= WARM_UP or args.spread < 0:
        parser.error(f"--steps {args.steps}, --spread {args.spread}: allowed are above {WARM_UP}, and 0 or more")
    try:
        found = measure(args)
    except (common.Unusable, subprocess.SubprocessError) as error:
        parser.exit(1, f"{error}\n")
    print(f"generation {found['generation_s']:.2f} s, training {found['training_s']:.2f} s a step")
    print(table(found, args.markdown))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
