#!/usr/bin/env python3
"""Kills random ranks of a PPO run again and again, and checks that the run's results are those of an undisturbed one.

    python tools/chaos.py --kills 50 --out /tmp/chaos [--judge pair] [-- FLAGS …]

Runs PPO (actor on two ranks, critic on one, reward and reference on one; a tiny model, a checkpoint each step) once
undisturbed and once with restarts, in which each start of the ranks but the last ends with a SIGKILL. Whom it hits and
when is drawn from the seed: the rank, one of its phases or the program's start, one of the times that it enters or
leaves this phase in the next one and a half steps, and up to some milliseconds after that. With `--judge` a language
model, taught the sums for a moment, judges the responses on rank 3, also again where it writes no number.

Compared are the digests of tools/record_runs.py: all metrics of all steps as printed except those of time and memory
(`time/`, `memory/`, and names with `_per_s` or `/sync_s`), all sample files, and every tensor, object and
manifest of every step's checkpoint, the last one included. Prints where the kills fell and exits with 1 if anything
differs, or if the run ended before all kills were done.
"""

import argparse
import functools
import json
import os
import random
import signal
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megarl import launcher, train_rl, train_sft  # noqa: E402
from megarl.extras import report  # noqa: E402
from megarl.observe.settings_file import processor  # noqa: E402
from megarl.observe.timers import Timers  # noqa: E402
from megarl.trainers import launch  # noqa: E402
from tools import record_runs  # noqa: E402
from tools.train_tokenizer import train as train_tokenizer  # noqa: E402

RANKS = 4
FLAGS = (
    "--role-map actor=0-1;critic=2;reward=3;reference=3 --num-layers 2 --hidden-size 32 --num-attention-heads 4"
    " --ffn-hidden-size 64 --swiglu --normalization RMSNorm --disable-bias-linear --make-vocab-size-divisible-by 32"
    " --max-prompt-length 6 --max-response-length 4 --max-tokens-per-microbatch 40 --prompts-per-step 6"
    " --samples-per-prompt 2 --minibatch-size 6 --ppo-epochs 2 --lr 1e-3 --critic-lr 3e-3 --kl-coefficient 0.05"
    " --kl-controller adaptive --kl-target 0.01 --rollout-buffer-gb 0.001 --rollout-max-requests 8 --seed 5"
    " --save-interval 1 --reward tools.chaos:digits"
)
JUDGE = (
    "--reward 0.02*judge+tools.chaos:digits --judge-max-length 160 --judge-buffer-gb 0.001 --judge-max-requests 8"
    " --reward-max-failures 1 --samples-per-prompt 3 --minibatch-size 9"
)
JUDGE_FILES = {  # what a judge of each mode reads
    "single": "{question}{answer}{response}=",
    "pair": "{question}{answer}{first}{second}=",
}
JUDGE_STEPS = 20  # in which it learns to write numbers, most of the time
DELAYS = (0.002, 0.05)  # seconds at most between a phase change and the kill: one or the other
START_DELAY = 0.5  # seconds at most between the program's start and a kill in its set-up
REACH = 1.5  # steps after a start in which kills fall
START = "start"  # stands for the program's start among the phases


class Kill(NamedTuple):
    """A planned SIGKILL of one rank."""

    rank: int
    change: int  # the phase change after which it comes; 0: the program's start
    delay: float  # seconds


def digits(sample) -> float:
    """A reward that differs between responses: the sum of the digits."""
    return sum(int(c) for c in sample.response if c.isdigit()) / 20


def plan(seed: int, kills: int, changes: list[list[str]]) -> list[Kill]:
    """The kill of each start. `changes`: by rank, the phases that its phase changes within reach enter or leave."""
    rng, planned = random.Random(seed), []
    for _ in range(kills):
        rank = rng.randrange(len(changes))
        phase = rng.choice([START, *sorted(set(changes[rank]))])
        if phase == START:
            planned.append(Kill(rank, 0, rng.uniform(0, START_DELAY)))
        else:
            numbers = [number for number, name in enumerate(changes[rank], 1) if name == phase]
            planned.append(Kill(rank, rng.choice(numbers), rng.uniform(0, rng.choice(DELAYS))))
    return planned


class PhaseChanges:
    """Counts the beginnings and ends of phases in this process."""

    def __init__(self):
        self.names, self.timers, phase = [], None, Timers.phase

        @contextmanager
        def counted(timers, role, name):
            with phase(timers, role, name):
                self._change(timers, f"{role}/{name}")
                yield
            self._change(timers, f"{role}/{name}")

        Timers.phase = counted  # type: ignore[assignment]  # same arguments, without annotations
        self._at, self._then = None, None

    def at(self, change: int, then):
        """Calls `then()` at this change."""
        self._at, self._then = change, then

    def _change(self, timers: Timers, name: str):
        self.names.append(name)
        self.timers = timers
        if len(self.names) == self._at:
            self._then()

    def where(self, last_step: int) -> tuple[int, str]:
        """Step and phase at this moment."""
        if self.timers is None or self.timers.step == 0:
            return 0, "set-up"
        current = self.timers.current()
        between = "end of the run" if self.timers.step == last_step else "between phases"
        return self.timers.step, "/".join(current) if current else between


def run(argv: list[str], prepare, restarts: int = 0) -> int:
    """Runs train_rl on forked ranks; `prepare()` is called on each before the program starts."""

    def rank() -> int:
        finish = prepare()
        _program("rl", argv)
        finish()
        return 0

    return launcher.run_ranks(rank, RANKS, restarts)


def _program(name: str, argv: list[str]) -> int:
    sys.argv = [f"megarl.train_{name}", *argv]
    report.write_report = lambda folder: None  # type: ignore[assignment]  # nobody reads the paths
    launch.launch({"rl": train_rl, "sft": train_sft}[name].train, name)
    return 0


def count_changes(folder: Path):
    """Makes this rank write the phases of its phase changes."""
    changes, rank = PhaseChanges(), os.environ["RANK"]
    return lambda: (folder / f"changes-{rank}").write_text(json.dumps(changes.names))


def arm(kills: list[Kill], record: Path, last_step: int):
    """Plans this start's kill if it hits this rank."""
    attempt, rank, changes = int(os.environ[launcher.ATTEMPT]), int(os.environ["RANK"]), PhaseChanges()
    if attempt < len(kills) and kills[attempt].rank == rank:
        kill = kills[attempt]

        def die():
            step, phase = changes.where(last_step)
            line = json.dumps({"attempt": attempt, "rank": rank, "step": step, "phase": phase}) + "\n"
            with open(record, "a") as file:
                file.write(line)
            os.kill(os.getpid(), signal.SIGKILL)

        def start():
            timer = threading.Timer(kill.delay, die)
            timer.daemon = True
            timer.start()

        start() if kill.change == 0 else changes.at(kill.change, start)
    return lambda: None


def make_inputs(folder: Path) -> list[str]:
    """Prompts and tokenizer; returns their flags."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(30) for b in range(10)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [text for row in rows for text in row.values()]
    (folder / "tokenizer.model").write_bytes(train_tokenizer(texts, 16, False))
    return ["--prompts", str(folder / "train.jsonl"), "--tokenizer-model", str(folder / "tokenizer.model")]


def make_judge(mode: str, folder: Path, inputs: list[str]) -> list[str]:
    """A judge that knows some sums; returns its flags. `inputs`: of `make_inputs`."""
    config = {
        "mode": mode, "messages": [{"role": "user", "content": JUDGE_FILES[mode]}], "number": {"last-number": True},
        "range": [0, 99], "temperature": 1, "max-tokens": 4, "samples": 2, "retries": 2,
    }  # fmt: skip
    (folder / "judge.yaml").write_text(json.dumps(config))
    shape = FLAGS[FLAGS.index("--num-layers") : FLAGS.index(" --prompts-per-step")].split()
    learns = f"--global-batch-size 12 --lr 1e-2 --train-iters {JUDGE_STEPS} --save {folder}/judge".split()
    if launcher.run_ranks(functools.partial(_program, "sft", [*shape, *inputs, *learns]), 1, 0):
        raise RuntimeError("the judge could not be trained")
    return [*JUDGE.split(), "--judge-config", str(folder / "judge.yaml"), "--judge-load", str(folder / "judge")]


def table(kills: list[dict]) -> str:
    """How many kills fell into each phase, and on each rank."""
    phases = Counter(kill["phase"] for kill in kills)
    ranks = Counter(kill["rank"] for kill in kills)
    lines = ["| phase | kills |", "|---|---|", *(f"| {phase} | {n} |" for phase, n in phases.most_common())]
    lines += [f"| all | {len(kills)} |", "", "ranks: " + ", ".join(f"{r}: {ranks[r]}" for r in range(RANKS))]
    return "\n".join(lines)


def compare(
    out: Path, seed: int, kills: int, steps: int, more: list[str], judge: str | None = None
) -> tuple[list[dict], list[str]]:
    """Both runs: the kills that were done, and what differs, a line each.

    Args:
        more: further flags of the run.
        judge: mode of a judge; None: there is none.
    """
    inputs = make_inputs(out / "data")
    judges = make_judge(judge, out / "data", inputs) if judge else []
    flags = [*FLAGS.split(), *inputs, "--train-iters", str(steps), *judges, *more]
    if run([*flags, "--save", str(out / "undisturbed")], lambda: count_changes(out)):
        raise RuntimeError("the undisturbed run failed")
    changes = [json.loads((out / f"changes-{rank}").read_text()) for rank in range(RANKS)]
    reach = [names[: int(REACH * len(names) / steps)] for names in changes]
    planned, record = plan(seed, kills, reach), out / "kills.jsonl"
    record.unlink(missing_ok=True)
    status = run([*flags, "--save", str(out / "disturbed")], lambda: arm(planned, record, steps), restarts=kills)
    done = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    problems = [f"the disturbed run ended with status {status}"] if status else []
    if len(done) < kills:
        problems.append(f"{len(done)} of {kills} kills before the run ended: give more --steps")
    if not status:
        recorded = [{"run": record_runs.record(out / name)} for name in ("undisturbed", "disturbed")]
        problems += record_runs.differences(*recorded)
    return done, problems


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="empty or new folder of the runs")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, help="of the run; default: as many as kills, at least 4")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--judge", choices=JUDGE_FILES, help="mode of a judge; default: the run has none")
    parser.add_argument("flags", nargs="*", help="further flags of the run, after --")
    options = parser.parse_args(argv)
    steps = options.steps or max(4, options.kills)
    done, problems = compare(options.out, options.seed, options.kills, steps, options.flags, options.judge)
    print(table(done))
    print(f"{steps} steps on {RANKS} ranks; processor: {processor()}")
    print("\n".join(problems) if problems else "no difference: metrics, samples and checkpoints are byte-identical")
    return bool(problems)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
