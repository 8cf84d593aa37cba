"""Environments and agents that take their time: seconds of a step whose tools sleep, against the same without sleeping.

    PYTHONPATH=. python tools/bench/environments.py [--prompts 8] [--turns 4] [--sleep 0.1] [--steps 4] [--rounds 3]
        [--sides environment,agent,program] [--hidden 256] [--flags "--branch-turns 2"] [--json FILE]

Whole runs of megarl.train_rl on one rank, a model of 4 layers with random weights, 8 samples of each prompt. Three
sides play the same episodes: an environment that answers turns, a coroutine that owns the loop, and a program that asks
over HTTP with Python's own client. Each runs with tools that answer at once, and with tools that sleep at random,
--sleep seconds on average. All runs must give the same samples, or the benchmark fails. The first step warms up;
figures are the seconds of the others, and without sleep the CPU time of all processes in them: that of a run less that
of a run of one step. Each is the least of --rounds, whose runs take turns.
"""

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from megarl.environments.agents.program import ProgramEnvironment
from megarl.environments.protocol import BaseEnvironment, Observation, Task, Turn
from tools.bench import common
from tools.bench.overlap import run_python

SIDES = {"environment": "Tool", "agent": "agent", "program": "program"}  # name: factory of this module
SAMPLES = 8
OBSERVATION = {"role": "user", "content": "+12="}
PROGRAM = Path(__file__).with_name("_tool_program.py")
FLAGS = (
    "--num-layers 4 --num-attention-heads 4 --make-vocab-size-divisible-by 8 --max-prompt-length 12"
    f" --samples-per-prompt {SAMPLES} --max-turn-length 64 --max-tokens-per-microbatch 4096 --rollout-max-requests 32"
    " --rollout-buffer-gb 1 --advantage rloo --kl-coefficient 0 --lr 1e-5 --seed 3 --rollout-prefix-caching"
)


def nap(task: Task) -> float:
    """Seconds that a tool sleeps: at random, which no seed decides."""
    return task.metadata["sleep"] * 2 * random.SystemRandom().random()


def score(texts: list[str]) -> float:
    """The reward of an episode's turns."""
    return sum(text.count("7") for text in texts) / 8


class Tool(BaseEnvironment):
    """Answers each turn after a while; ends after as many turns as the task says."""

    def reset(self, task: Task) -> Observation:
        """Remembers the task."""
        self._task, self._texts = task, []
        return Observation()

    async def step(self, turn: Turn) -> Observation:
        """The same answer to each turn."""
        await asyncio.sleep(nap(self._task))
        self._texts.append(turn.content)
        done = len(self._texts) == self._task.metadata["turns"]
        return Observation([OBSERVATION], score(self._texts) if done else 0.0, done)


async def agent(task, client) -> float:
    """`Tool` as a coroutine."""
    messages, texts = list(task.messages), []
    for _ in range(task.metadata["turns"]):
        answer = (await client.chat.completions.create(model="policy", messages=messages)).choices[0]
        if answer.finish_reason == "length":
            return 0.0
        await asyncio.sleep(nap(task))
        texts.append(answer.message.content)
        messages += [{"role": "assistant", "content": texts[-1]}, OBSERVATION]
    return score(texts)


def program() -> ProgramEnvironment:
    """`Tool` as a program."""
    return ProgramEnvironment([sys.executable, "-IS", str(PROGRAM), "{task}"], reward=_reward)


def _reward(run) -> float:
    texts = [message["content"] for message in run.conversations[-1] if message["role"] == "assistant"]
    return 0.0 if run.truncated else score(texts)


def write_files(folder: Path, args: argparse.Namespace) -> dict[str, list[str]]:
    """Flags of prompts and tokenizer for tools that are awake, and for those that sleep."""
    flags = {}
    for name, sleep in (("awake", 0.0), ("asleep", args.sleep)):
        metadata = {"turns": args.turns, "sleep": sleep, "observation": OBSERVATION["content"]}
        rows = [{"prompt": f"{i % 100}+1=", "metadata": metadata} for i in range(args.prompts * args.steps)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags[name] = ["--prompts", str(folder / f"{name}.jsonl"), "--tokenizer-model", f"{folder / 'tokenizer'}.model"]
    tokenizer = ["--input", str(folder / "awake.jsonl"), "--vocab-size", "20", "--out", str(folder / "tokenizer")]
    run_python(["tools/train_tokenizer.py", *tokenizer])
    return flags


class Run(NamedTuple):
    """What a run of megarl.train_rl took and gave."""

    seconds: float  # of the steps after the first
    cpu_seconds: float  # of all processes, from start to end
    samples: list[bytes]  # of each step
    turns: float  # of the steps after the first


def run(save: Path, flags: list[str], steps: int) -> Run:
    """One run of so many steps."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    iters = ["--train-iters", str(steps)]
    run_python(["-m", "megarl.launcher", "--nproc-per-node", "1", "train_rl", *flags, *iters, "--save", str(save)])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()][1:]
    return Run(
        sum(row["perf/tokens"] / row["perf/tokens_per_s"] for row in rows),
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        [path.read_bytes() for path in sorted((save / "samples").glob("*.jsonl"))],
        sum(row["environment/turns_mean"] for row in rows),
    )


def measure(args: argparse.Namespace) -> dict:
    """Runs all sides in turn."""
    seconds, cpu, expected = defaultdict(list), defaultdict(list), None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = write_files(folder, args)
        shape = f"--hidden-size {args.hidden} --ffn-hidden-size {2 * args.hidden} --max-turns {args.turns}"
        size = f"--max-response-length {args.turns * 72} --prompts-per-step {args.prompts}"
        common_flags = f"{FLAGS} {shape} {size} {args.flags}".split()
        for number in range(args.rounds):
            for side in args.sides:
                for pace, flags in files.items():
                    chosen = [*common_flags, *flags, "--environment", f"tools.bench.environments:{SIDES[side]}"]
                    found = run(folder / f"{number}-{side}-{pace}", chosen, args.steps)
                    if found.samples != (expected := expected or found.samples):
                        raise common.Unusable(f"environments.py: {side}, {pace}: the samples differ")
                    seconds[f"{side}, {pace}"].append(found.seconds)
                    print(f"{side:>11} {pace:>6}: {found.seconds:6.2f} s", flush=True)
                    if pace == "awake":
                        start = run(folder / f"{number}-{side}-start", chosen, 1)
                        cpu[side].append(found.cpu_seconds - start.cpu_seconds)
    turns = found.turns * args.prompts * SAMPLES
    return {"seconds": seconds, "cpu_seconds": cpu, "turns": turns, "options": vars(args)}


def main():
    """Measures and prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--sleep", type=float, default=0.1, help="mean seconds of each answer")
    parser.add_argument("--steps", type=int, default=4, help="of a run, above 1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=256, help="hidden size")
    parser.add_argument("--flags", default="", help="further flags of all runs")
    parser.add_argument("--sides", default=",".join(SIDES), help="which, separated by commas")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    args.sides = args.sides.split(",")
    if args.steps < 2 or not set(args.sides) <= set(SIDES):
        parser.error(f"--steps {args.steps}, --sides {args.sides}: allowed are 2 or more, and {', '.join(SIDES)}")
    found = measure(args)
    best, cpu = ({name: min(each) for name, each in found[kind].items()} for kind in ("seconds", "cpu_seconds"))
    first = args.sides[0]
    for side in args.sides:
        awake, asleep = best[f"{side}, awake"], best[f"{side}, asleep"]
        ratios = f"{awake / best[f'{first}, awake']:.2f} times {first}, CPU {cpu[side] / cpu[first]:.2f} times"
        more = 1000 * (cpu[side] - cpu[first]) / found["turns"]
        print(f"{side:>11}: asleep {asleep / awake:.2f} times awake; awake {ratios}, {more:+.2f} ms of CPU a turn")
    if args.json:
        args.json.write_text(json.dumps(found | {"best": best, "best_cpu": cpu}, default=str))


if __name__ == "__main__":
    main()
