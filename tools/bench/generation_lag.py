"""Generation that runs ahead: seconds of a step for several `--generation-lag`, beside a model of two queues.

    PYTHONPATH=. python tools/bench/generation_lag.py [--ranks 2|4] [--steps 24] [--lags 0,1,2,4] [--spread 0.6]
        [--json FILE] [--markdown]

Whole runs of megarl.train_rl with a tiny model. Of two ranks one generates and one trains; of four each has one task:
actor, critic, reward with reference, rollout. They sleep most of the time, so that two cores are enough: episodes wait
for a tool, and a reward takes as long on average. The tool's times depend on the prompt alone, so all runs wait equally
long; `--spread` is their coefficient of variation. together: all ranks generate, then all train.

The model gets the seconds of the stages of each step of the run without lag: generation, on four ranks scoring, and
training, which is the rest of the step. A stage works on a batch when the stage before is done with it and it is done
with the batch before; generation also waits for the weights of `lag` + 1 steps before.
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
from typing import NamedTuple

from megarl.data.order import PromptOrder
from megarl.environments.protocol import BaseEnvironment, Observation, Task, Turn
from megarl.rewards.base import Sample
from tools.bench import common
from tools.bench.overlap import run_python

PROMPTS, SAMPLES, WARM_UP = 4, 2, 6
TOOL, REWARD = 0.6, 0.6  # mean seconds of a step's longest tool call, and of its rewards together


class Layout(NamedTuple):
    """Ranks of the roles in a run whose ranks have tasks of their own, and in one where each has all of them."""

    apart: str
    together: str
    flags: str
    scoring: tuple[str, ...]  # metrics: seconds of the ranks that only score


LAYOUTS = {  # number of ranks: layout
    2: Layout("actor=0;reward=0;rollout=1", "actor=0-1;reward=0-1", "--advantage grpo --kl-coefficient 0", ()),
    4: Layout(
        "actor=0;critic=1;reward=2;reference=2;rollout=3", "actor=0-3;critic=0-3;reward=0-3;reference=0-3",
        "--kl-coefficient 0.05 --critic-lr 1e-5", ("time/reward/score_s", "time/reference/logprobs_s"),
    ),
}  # fmt: skip
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --make-vocab-size-divisible-by 8 --max-prompt-length 12"
    " --max-response-length 4 --max-tokens-per-microbatch 200 --rollout-buffer-gb 0.001 --rollout-max-requests 16"
    " --lr 1e-5 --rollout-correction tis --environment-workers 1"
    f" --prompts-per-step {PROMPTS} --samples-per-prompt {SAMPLES} --max-turn-length 4 --max-turns 1 --seed 3"
    " --environment tools.bench.generation_lag:SlowTool --reward tools.bench.generation_lag:slow_reward"
)


class SlowTool(BaseEnvironment):
    """Begins an episode after as many seconds as its prompt says: truncated turns, which call no tool, wait, too."""

    async def reset(self, task: Task) -> Observation:
        """Waits without a core."""
        await asyncio.sleep(task.metadata["seconds"])
        return Observation()

    def step(self, turn: Turn) -> Observation:
        """Ends the episode."""
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


def run(ranks: int, flags: list[str], save: Path) -> list[dict[str, float]]:
    """The metrics of each step of a run."""
    run_python(["-m", "megarl.launcher", "--nproc-per-node", str(ranks), "train_rl", *flags, "--save", str(save)])
    return [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]


def seconds_of(row: dict[str, float]) -> float:
    """Seconds between the ends of a step and of the one before on the rank that trains."""
    return row["perf/tokens"] / row["perf/tokens_per_s"]


def predicted(stages: list[list[float]], lag: int) -> list[float]:
    """Seconds of each step by the model; `stages`: seconds of each step, from generation to training."""
    ends, trained = [0.0] * len(stages), [0.0]
    for i, seconds in enumerate(zip(*stages, strict=True), start=1):
        ready = trained[i - 1 - lag] if i - 1 - lag > 0 else 0.0
        for stage, each in enumerate(seconds):
            ready = ends[stage] = max(ends[stage], ready) + each
        trained.append(ready)
    return [after - before for before, after in itertools.pairwise(trained)]


def stages_of(rows: list[dict[str, float]], layout: Layout) -> list[list[float]]:
    """The `stages` of a run without lag."""
    generation = [row["time/rollout/rollout_s"] for row in rows]
    scoring = [sum(row[name] for name in layout.scoring) for row in rows]
    training = [seconds_of(row) - g - s for row, g, s in zip(rows, generation, scoring, strict=True)]
    return [generation, scoring, training] if layout.scoring else [generation, training]


def measure(args: argparse.Namespace) -> dict:
    """Runs all sides once, one after another."""
    layout = LAYOUTS[args.ranks]
    with tempfile.TemporaryDirectory() as name:
        folder, sides = Path(name), {}
        flags = [*write_prompts(folder, args.steps, args.spread), *FLAGS.split(), *layout.flags.split()]
        flags += ["--train-iters", str(args.steps), "--role-map"]
        rows = {f"lag {lag}": run(args.ranks, [*flags, layout.apart, "--generation-lag", str(lag)], folder / f"{lag}")
                for lag in args.lags}  # fmt: skip
        rows["together"] = run(args.ranks, [*flags, layout.together], folder / "together")
    stages = stages_of(rows["lag 0"], layout)
    for side, of_steps in rows.items():
        model = predicted(stages, int(side.split()[1])) if side != "together" else None
        sides[side] = {
            "step_s": statistics.fmean(map(seconds_of, of_steps[WARM_UP:])),
            "predicted_s": model and statistics.fmean(model[WARM_UP:]),
            "staleness": of_steps[-1].get("rollout/staleness", 0),
        }
    return {"case": "generation_lag", "ranks": args.ranks, "steps": args.steps, "spread": args.spread,
            "stages_s": [statistics.fmean(seconds[WARM_UP:]) for seconds in stages], "sides": sides}  # fmt: skip


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
    parser.add_argument("--ranks", type=int, default=2, choices=LAYOUTS, help="ranks of each run")
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
    print(f"generation to training: {', '.join(f'{seconds:.2f}' for seconds in found['stages_s'])} s a step")
    print(table(found, args.markdown))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
