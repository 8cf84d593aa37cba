"""Generation that runs ahead: seconds of a step for several `--generation-lag`, beside a model of two queues.

    PYTHONPATH=. python tools/bench/generation_lag.py [--ranks 2|4] [--steps 24] [--lags 0,1,2,4] [--spread 0.6]
        [--tool 0.6] [--reward 0.6] [--recorded] [--json FILE] [--markdown]

Whole runs of megarl.train_rl with a tiny model. Of two ranks one generates and one trains; of four each has one task:
actor, critic, reward with reference, rollout. They sleep most of the time, so that two cores are enough: episodes wait
for a tool, and a reward takes as long on average. The tool's times depend on the prompt alone, so all runs wait equally
long; `--spread` is their coefficient of variation. together: all ranks generate, then all train. `--recorded` runs each
lag also with `--generation-schedule recorded`, where the clock says which weights a round begins with.

The model gets the seconds of the stages of each step of the run without lag: generation, on four ranks scoring, and
training, which is the rest of the step. A stage works on a batch when the stage before is done with it and it is done
with the batch before; generation also waits for the weights of `lag` + 1 steps before, and with a recorded schedule it
takes the newest that are there. Staleness is the mean over steps of the updates between generation and training.
"""

import argparse
import asyncio
import bisect
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
RECORDED = ["--generation-schedule", "recorded", "--save-interval", "0", "--eval-interval", "0"]


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
    time.sleep(sample.metadata["reward_seconds"] / (PROMPTS * SAMPLES))
    return len(sample.response) / 10


def write_prompts(folder: Path, args: argparse.Namespace) -> list[str]:
    """Prompts whose tools take log-normal times, the same for those that are drawn together; returns their flags."""
    steps, spread = args.steps, args.spread
    rng, sigma = random.Random(1), math.sqrt(math.log(1 + spread * spread))
    rows, order = [{}] * (steps * PROMPTS), PromptOrder(steps * PROMPTS, 3)
    for _ in range(steps):
        seconds = args.tool * math.exp(sigma * rng.gauss(0, 1) - sigma * sigma / 2)
        metadata = {"seconds": seconds, "reward_seconds": args.reward}
        for line in order.take(PROMPTS):
            rows[line] = {"prompt": f"{line % 100}+1=", "answer": "1", "metadata": metadata}
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


def simulated(stages: list[list[float]], lag: int) -> list[tuple[float, float]]:
    """When each step's generation begins and its training ends by the model; `stages`: seconds of each step, from
    generation to training."""
    ends, times = [0.0] * len(stages), list[tuple[float, float]]()
    for i, seconds in enumerate(zip(*stages, strict=True)):
        ready = begin = max(ends[0], times[i - 1 - lag][1] if i > lag else 0.0)
        for stage, each in enumerate(seconds):
            ready = ends[stage] = max(ends[stage], ready) + each
        times.append((begin, ready))
    return times


def predicted(stages: list[list[float]], lag: int) -> list[float]:
    """Seconds of each step by the model."""
    trained = [0.0, *(end for _, end in simulated(stages, lag))]
    return [after - before for before, after in itertools.pairwise(trained)]


def predicted_staleness(stages: list[list[float]], lag: int) -> list[int]:
    """Updates between the newest weights as each step's generation begins, and those before its training."""
    times = simulated(stages, lag)
    trained = [end for _, end in times]
    return [i - bisect.bisect_right(trained, begin, hi=i) for i, (begin, _) in enumerate(times)]


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
        flags = [*write_prompts(folder, args), *FLAGS.split(), *layout.flags.split()]
        flags += ["--train-iters", str(args.steps), "--role-map"]
        rows = {}
        for lag, is_recorded in itertools.product(args.lags, (False, True) if args.recorded else (False,)):
            if lag or not is_recorded:
                more, name = (RECORDED, f"lag {lag}, recorded") if is_recorded else ([], f"lag {lag}")
                more = [layout.apart, "--generation-lag", str(lag), *more]
                rows[name] = run(args.ranks, [*flags, *more], folder / name.replace(" ", "-"))
        rows["together"] = run(args.ranks, [*flags, layout.together], folder / "together")
    stages = stages_of(rows["lag 0"], layout)
    for side, of_steps in rows.items():
        sides[side] = {"step_s": statistics.fmean(map(seconds_of, of_steps[WARM_UP:])), "predicted_s": None}
        if side != "together":
            lag = int(side.removesuffix(", recorded").split()[1])
            ages = predicted_staleness(stages, lag) if "recorded" in side else [lag] * args.steps
            sides[side] |= {
                "predicted_s": statistics.fmean(predicted(stages, lag)[WARM_UP:]),
                "staleness": statistics.fmean(row.get("rollout/staleness", 0) for row in of_steps[WARM_UP:]),
                "predicted_staleness": statistics.fmean(ages[WARM_UP:]),
            }
    return {"case": "generation_lag", "ranks": args.ranks, "steps": args.steps, "spread": args.spread,
            "stages_s": [statistics.fmean(seconds[WARM_UP:]) for seconds in stages], "sides": sides}  # fmt: skip


def table(found: dict, markdown: bool) -> str:
    """A line per side: seconds of a step, the model's, their ratio, how much faster it is than without lag, staleness,
    and the model's."""
    lines = [["side", "s a step", "model", "ratio", "speed", "staleness", "model"]]
    base = found["sides"]["lag 0"]["step_s"]
    for name, side in found["sides"].items():
        model = side["predicted_s"]
        prediction = ["", ""] if model is None else [f"{model:.3f}", f"{side['step_s'] / model:.2f}"]
        ages = [f"{side[key]:.2f}" if key in side else "" for key in ("staleness", "predicted_staleness")]
        lines.append([name, f"{side['step_s']:.3f}", *prediction, f"{base / side['step_s']:.2f}", *ages])
    if markdown:
        return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return "\n".join("  ".join(cell.rjust(15) for cell in cells) for cells in lines)


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=2, choices=LAYOUTS, help="ranks of each run")
    parser.add_argument("--steps", type=int, default=24, help=f"steps of each run, above {WARM_UP}")
    parser.add_argument("--lags", default="0,1,2,4", help="lags, separated by commas; 0 always runs")
    parser.add_argument("--spread", type=float, default=0.6, help="coefficient of variation of the tool's times")
    parser.add_argument("--tool", type=float, default=0.6, help="mean seconds of a step's tool calls")
    parser.add_argument("--reward", type=float, default=0.6, help="seconds of a step's rewards together")
    parser.add_argument("--recorded", action="store_true", help="run each lag with a recorded schedule, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    parser.add_argument("--markdown", action="store_true", help="print rows of a Markdown table")
    args = parser.parse_args()
    args.lags = sorted({0, *map(int, args.lags.split(","))})
    if args.steps <= WARM_UP or min(args.spread, args.tool, args.reward) < 0:
        parser.error(
            f"--steps {args.steps}, --spread {args.spread}, --tool {args.tool}, --reward {args.reward}: allowed are "
            f"above {WARM_UP}, and 0 or more"
        )
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
