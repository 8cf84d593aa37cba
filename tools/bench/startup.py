"""Start-up: seconds from the command line to the end of the first rollout, for the quickstart on 1, 2 and 4 ranks.

    PYTHONPATH=. python tools/bench/startup.py [--ranks 1,2,4] [--rounds 3] [--json FILE] [--markdown]

run.sh is `bash launch/run.sh train_rl …` as in launch/quickstart.sh; torchrun starts the same program with torchrun,
which imports everything in every rank and checks nothing first. They alternate. Times come from the run's
timeline.json: the first rollout begins when set-up is done. Also measured alone: setup_env.sh, the imports, and a whole
`--check`. Before the first round, launch/warm_start.sh makes data and a policy of two updates in a temporary folder,
and each side runs once.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tools.bench.tables import add_output_flags, whole_table

ROOT = Path(__file__).parents[2]
LAYOUTS = {1: [], 2: ["--actor-tensor-model-parallel-size", "2"], 4: [
    "--role-map", "actor=0-1;critic=2-3;reward=2-3;reference=2-3",
]}  # fmt: skip
CHOSEN = ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def environment(**more: str) -> dict[str, str]:
    """The environment of a user's shell with this interpreter; the launcher chooses threads; bytecode is cached."""
    kept = {name: value for name, value in os.environ.items() if name not in CHOSEN}
    # Unset variables of the launch scripts that this shell may use for something else.
    own = dict.fromkeys(("CONFIG", "NNODES", "PYTHON"), "")
    return kept | own | {"MEGARL_VENV": sys.prefix, "PYTHONPATH": str(ROOT)} | more


def timed(command: list[str], **variables: str) -> float:
    """Seconds of a command; SystemExit with its output if it fails."""
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - began


def first_rollout(folder: Path, began: float) -> dict[str, float]:
    """Seconds from `began` (Unix time) to begin and end of the first rollout, on its slowest rank."""
    trace = json.loads((folder / "timeline.json").read_text())
    origin = int(trace["otherData"]["start_unix_ns"]) / 1e9 - began
    first = {}
    for event in sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: e["ts"]):
        if event["name"].endswith(("/rollout", "/eval_rollout")):
            first.setdefault(event["tid"], event)
    begins = [event["ts"] / 1e6 for event in first.values()]
    ends = [(event["ts"] + event["dur"]) / 1e6 for event in first.values()]
    return {"set_up_s": origin + max(begins), "first_rollout_s": origin + max(ends)}


@contextlib.contextmanager
def warm_start() -> Iterator[Path]:
    """A temporary folder with the quickstart's data and a policy of two updates."""
    with tempfile.TemporaryDirectory() as name:
        flags = ["--train-iters", "2", "--eval-interval", "2", "--lr-warmup-iters", "1"]
        timed(["bash", "launch/warm_start.sh", *flags], SAVE=name)
        yield Path(name)


class Quickstart:
    """One step of the quickstart's PPO on `ranks` ranks."""

    def __init__(self, folder: Path, ranks: int, root: Path = ROOT):
        """`folder`: of `warm_start`; `root`: the checkout of megarl whose recipe it is."""
        self.folder, self.ranks, self.number = folder, ranks, 0
        data = folder / "data"
        self.flags = [
            "--config", str(root / "configs" / "quickstart.yaml"), "--prompts", str(data / "train.jsonl"),
            "--eval-prompts", str(data / "heldout.jsonl"), "--tokenizer-model", str(data / "tokenizer.model"),
            "--pretrained-checkpoint", str(folder / "sft"), "--train-iters", "1", *LAYOUTS[ranks],
        ]  # fmt: skip

    def run(self, *command: str) -> dict[str, float]:
        """Starts it with a command and returns its times."""
        self.number += 1
        save = self.folder / f"{self.ranks}-{self.number}"
        began = time.time()
        timed([*command, *self.flags, "--save", str(save)], NPROC=str(self.ranks))
        return first_rollout(save, began)

    def by_script(self) -> dict[str, float]:
        """Starts it with launch/run.sh."""
        return self.run("bash", "launch/run.sh", "train_rl")

    def by_torchrun(self) -> dict[str, float]:
        """Starts it with torchrun."""
        return self.run(sys.executable, *TORCHRUN, str(self.ranks), "-m", "megarl.train_rl")

    def parts(self) -> dict[str, float]:
        """Seconds of each part of a start, measured alone."""
        check = [sys.executable, "-m", "megarl.train_rl", *self.flags, "--save", str(self.folder / "unused"), "--check"]
        return {
            "environment_s": timed(["bash", "launch/setup_env.sh"]),
            "import_torch_s": timed([sys.executable, "-c", "import torch"]),
            "import_all_s": timed([sys.executable, "-c", "import megarl.train_rl"]),
            "check_s": timed(check, WORLD_SIZE=str(self.ranks)),
        }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Median of each number over the rounds."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def measure(folder: Path, ranks: int, rounds: int) -> dict:
    """Runs all rounds on `ranks` ranks."""
    start = Quickstart(folder, ranks)
    sides = {"run.sh": start.by_script, "torchrun": start.by_torchrun}
    for side in sides.values():
        side()
    rows = {"parts": [], **{name: [] for name in sides}}
    for number in range(rounds):
        rows["parts"].append(start.parts())
        for name in sides if number % 2 == 0 else reversed(sides):
            rows[name].append(sides[name]())
            print(f"  {ranks} ranks, round {number + 1}, {name}: {rows[name][-1]['first_rollout_s']:.2f} s", flush=True)
    found = {"ranks": ranks} | {name: medians(measured) for name, measured in rows.items()} | {"rounds": rows}
    found["ratio"] = found["torchrun"]["first_rollout_s"] / found["run.sh"]["first_rollout_s"]
    return found


def table(rows: list[dict], markdown: bool) -> str:
    """Ranks, parts, set-up and first rollout by run.sh, first rollout by torchrun, ratio."""
    lines = [["ranks", "environment", "imports", "--check", "set-up", "first rollout", "torchrun", "ratio"]]
    for row in rows:
        parts, ours = row["parts"], row["run.sh"]
        seconds = [parts["environment_s"], parts["import_all_s"], parts["check_s"], *ours.values()]
        seconds.append(row["torchrun"]["first_rollout_s"])
        lines.append([str(row["ranks"]), *(f"{value:.2f} s" for value in seconds), f"{row['ratio']:.2f}"])
    return whole_table(lines, markdown, 15)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ranks", default="1,2,4", help="numbers of ranks, of 1, 2 and 4")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each side; default: %(default)s")
    add_output_flags(parser)
    args = parser.parse_args(argv)
    wanted = [text.strip() for text in args.ranks.split(",")]
    if args.rounds < 1 or not set(wanted) <= {str(ranks) for ranks in LAYOUTS}:
        parser.error(f"--ranks {args.ranks} --rounds {args.rounds}: allowed are 1, 2 and 4, and at least 1 round")
    with warm_start() as folder:
        rows = [measure(folder, int(ranks), args.rounds) for ranks in wanted]
    print(table(rows, args.markdown))
    if args.json:
        args.json.write_text(json.dumps({"cpus": os.cpu_count(), "starts": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
