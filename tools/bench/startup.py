"""Start-up: seconds from the command line to the end of the first rollout, for the quickstart on 1, 2 and 4 ranks.

    PYTHONPATH=. python tools/bench/startup.py [--ranks 1,2,4] [--rounds 3] [--json FILE] [--markdown]

run.sh is `bash launch/run.sh train_rl …` as launch/quickstart.sh calls it; torchrun is the same program started by
torchrun, which imports everything in every rank and checks nothing first. They take turns. The first rollout begins
where a run is set up, and its end is a little behind its first token: the times are those of the run's timeline.json.
What each part takes alone: the environment's script, the imports, and a whole `--check`. Before the first round
launch/warm_start.sh makes data and a policy of two updates in a temporary folder, and every side runs once.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.bench.tables import add_output_flags, whole_table

ROOT = Path(__file__).parents[2]
LAYOUTS = {1: [], 2: ["--actor-tensor-model-parallel-size", "2"], 4: [
    "--role-map", "actor=0-1;critic=2-3;reward=2-3;reference=2-3",
]}  # fmt: skip
CHOSEN = ("PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def environment(**more: str) -> dict[str, str]:
    """Of a user's shell: this interpreter, threads as the launchers choose them, compiled modules that are kept."""
    kept = {name: value for name, value in os.environ.items() if name not in CHOSEN}
    # Empty: the variables of the scripts in launch/ that this shell may have for something else.
    own = dict.fromkeys(("CONFIG", "NNODES", "PYTHON"), "")
    return kept | own | {"MEGARL_VENV": sys.prefix, "PYTHONPATH": str(ROOT)} | more


def timed(command: list[str], **variables: str) -> float:
    """Seconds of a command; SystemExit with what it said where it fails."""
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - began


def first_rollout(folder: Path, began: float) -> dict[str, float]:
    """Seconds from `began` (since 1970) to the first rollout's begin and end, on the last of its ranks."""
    trace = json.loads((folder / "timeline.json").read_text())
    origin = int(trace["otherData"]["start_unix_ns"]) / 1e9 - began
    first = {}
    for event in sorted((e for e in trace["traceEvents"] if e["ph"] == "X"), key=lambda e: e["ts"]):
        if event["name"].endswith("/rollout"):
            first.setdefault(event["tid"], event)
    begins = [event["ts"] / 1e6 for event in first.values()]
    ends = [(event["ts"] + event["dur"]) / 1e6 for event in first.values()]
    return {"set_up_s": origin + max(begins), "first_rollout_s": origin + max(ends)}


class Quickstart:
    """The quickstart's PPO stage for one step, on so many ranks."""

    def __init__(self, folder: Path, ranks: int):
        self.folder, self.ranks, self.number = folder, ranks, 0
        data = folder / "data"
        self.flags = [
            "--config", str(ROOT / "configs" / "quickstart.yaml"), "--prompts", str(data / "train.jsonl"),
            "--eval-prompts", str(data / "heldout.jsonl"), "--tokenizer-model", str(data / "tokenizer.model"),
            "--pretrained-checkpoint", str(folder / "sft"), "--train-iters", "1", *LAYOUTS[ranks],
        ]  # fmt: skip

    def run(self, *command: str) -> dict[str, float]:
        """Starts it by that command."""
        self.number += 1
        save = self.folder / f"{self.ranks}-{self.number}"
        began = time.time()
        timed([*command, *self.flags, "--save", str(save)], NPROC=str(self.ranks))
        return first_rollout(save, began)

    def by_script(self) -> dict[str, float]:
        """As users start it."""
        return self.run("bash", "launch/run.sh", "train_rl")

    def by_torchrun(self) -> dict[str, float]:
        """By torchrun itself."""
        return self.run(sys.executable, *TORCHRUN, str(self.ranks), "-m", "megarl.train_rl")

    def parts(self) -> dict[str, float]:
        """Seconds of what a start consists of, each alone."""
        check = [sys.executable, "-m", "megarl.train_rl", *self.flags, "--save", str(self.folder / "unused"), "--check"]
        return {
            "environment_s": timed(["bash", "launch/setup_env.sh"]),
            "import_torch_s": timed([sys.executable, "-c", "import torch"]),
            "import_all_s": timed([sys.executable, "-c", "import megarl.train_rl"]),
            "check_s": timed(check, WORLD_SIZE=str(self.ranks)),
        }


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of each number over the rounds."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def measure(folder: Path, ranks: int, rounds: int) -> dict:
    """All rounds on so many ranks."""
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
    found = {"ranks": ranks} | {name: medians(each) for name, each in rows.items()} | {"rounds": rows}
    found["ratio"] = found["torchrun"]["first_rollout_s"] / found["run.sh"]["first_rollout_s"]
    return found


def table(rows: list[dict], markdown: bool) -> str:
    """Ranks, parts, set-up and first rollout by run.sh, first rollout by torchrun, ratio."""
    lines = [["ranks", "environment", "imports", "--check", "set-up", "first rollout", "torchrun", "ratio"]]
    for row in rows:
        parts, ours = row["parts"], row["run.sh"]
        seconds = [parts["environment_s"], parts["import_all_s"], parts["check_s"], *ours.values()]
        seconds.append(row["torchrun"]["first_rollout_s"])
        lines.append([str(row["ranks"]), *(f"{each:.2f} s" for each in seconds), f"{row['ratio']:.2f}"])
    return whole_table(lines, markdown, 15)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ranks", default="1,2,4", help="which of 1, 2 and 4")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each side")
    add_output_flags(parser)
    args = parser.parse_args(argv)
    wanted = [text.strip() for text in args.ranks.split(",")]
    if args.rounds < 1 or not set(wanted) <= {str(ranks) for ranks in LAYOUTS}:
        parser.error(f"--ranks {args.ranks} --rounds {args.rounds}: allowed are 1, 2 and 4, and at least 1 round")
    with tempfile.TemporaryDirectory() as name:
        flags = ["--train-iters", "2", "--eval-interval", "2", "--lr-warmup-iters", "1"]
        timed(["bash", "launch/warm_start.sh", *flags], SAVE=name)
        rows = [measure(Path(name), int(ranks), args.rounds) for ranks in wanted]
    print(table(rows, args.markdown))
    if args.json:
        args.json.write_text(json.dumps({"cpus": os.cpu_count(), "starts": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
