"""Idle ranks: a step of the quickstart on four ranks of disjoint roles, before and after the roles' work overlaps.

    PYTHONPATH=. python tools/bench/overlap.py [--rounds 3] [--steps 6] [--sides replicas,ahead] [--json FILE]
        [--markdown] [-- FLAGS …]

Whole runs of megarl.train_rl with configs/quickstart.yaml from random weights, FLAGS added to each. before: two ranks
for the actor, one for the critic, one for reward and reference. replicas: two ranks for the actor and two for all
others, each a data-parallel replica, as in launch/quickstart.sh. ahead: the ranks of before, with a rollout on the
last one, which generates a batch while the policy is updated on the previous one.

Idle is the fraction of ranks × seconds in which a rank waits for others (`time/idle_fraction`): the median over steps
after the first two, then over rounds. Ranks that share cores slow each other down when they work at the same time: with
fewer cores than ranks, less idle time saves less than with one core or GPU per rank.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.bench import common

ROOT = Path(__file__).parents[2]
RANKS, WARM_UP, BEFORE = 4, 2, "before"
SPLIT = "--role-map actor=0-1;critic=2;reward=3;reference=3{} --actor-tensor-model-parallel-size 2"
REPLICAS = "--role-map actor=0-1;critic=2-3;reward=2-3;reference=2-3"
AHEAD = " --rollout-tensor-model-parallel-size 1 --generation-lag 1 --rollout-correction tis"
SIDES = {
    BEFORE: SPLIT.format(""), "replicas": REPLICAS, "ahead": SPLIT.format(";rollout=3") + AHEAD,
}  # fmt: skip
# Keys of the quickstart's config to unset: data are made here, weights are random, and only steps are timed.
NOTHING = ("pretrained-checkpoint", "eval-prompts", "eval-interval", "eval-samples", "save-interval")
DATA = (
    "--task basic_arithmetic --train 4000 --heldout 400 --seed 1 --task-option allow_parentheses=false --task-option"
    " min_terms=2 --task-option max_terms=2 --task-option min_digits=1 --task-option max_digits=2"
)


def run_python(arguments: list[str]):
    """Runs Python with these arguments, one thread per rank; raises Unusable with its output if it fails."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise common.Unusable(done.stdout + done.stderr)


def make_inputs(folder: Path) -> list[str]:
    """Makes the quickstart's prompts and tokenizer; returns their flags."""
    template = ["--prompt-template", "{metadata[expression]} =", "--task-option", 'operators=["+"]']
    prompts, tokenizer = str(folder / "train.jsonl"), folder / "tokenizer"
    run_python(["tools/make_prompts.py", *DATA.split(), *template, "--out", str(folder)])
    run_python(["tools/train_tokenizer.py", "--input", prompts, "--vocab-size", "32", "--out", str(tokenizer)])
    (folder / "nothing.yaml").write_text("".join(f"{key}: null\n" for key in NOTHING))
    files = ["--config", str(ROOT / "configs" / "quickstart.yaml"), str(folder / "nothing.yaml")]
    return [*files, "--prompts", prompts, "--tokenizer-model", f"{tokenizer}.model"]


def run(flags: list[str], steps: int, save: Path) -> dict[str, float]:
    """Runs once; medians over steps of the idle fraction (overall and per role) and of the seconds of a step."""
    launcher = ["-m", "megarl.launcher", "--nproc-per-node", str(RANKS), "train_rl"]
    run_python([*launcher, *flags, "--train-iters", str(WARM_UP + steps), "--save", str(save)])
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    names = [name for name in rows[-1] if name.endswith("idle_fraction")] + ["time/step_s"]
    return {name: statistics.median(row[name] for row in rows) for name in names}


def measure(args: argparse.Namespace) -> dict:
    """Runs all sides alternately in each round."""
    runs = {name: [] for name in args.sides}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = make_inputs(folder)

        def side(name: str) -> float:
            flags = [*inputs, *SIDES[name].split(), *args.flags]
            runs[name].append(run(flags, args.steps, folder / f"{name}{len(runs[name])}"))
            return runs[name][-1]["time/step_s"]

        seconds = common.alternate({name: lambda name=name: side(name) for name in args.sides}, args.rounds)
    sides = {
        name: {
            "flags": SIDES[name], "step_s": statistics.median(seconds[name]), "seconds": seconds[name],
            "idle": {key: statistics.median(run[key] for run in runs[name])
                     for key in runs[name][0] if key.endswith("idle_fraction")},
        }
        for name in args.sides
    }  # fmt: skip
    idle = {name: side["idle"]["time/idle_fraction"] for name, side in sides.items()}
    return {
        "case": "quickstart", "ranks": RANKS, "cores": os.cpu_count(), "steps": args.steps, "sides": sides,
        "idle_ratio": {name: share / idle[BEFORE] for name, share in idle.items() if name != BEFORE},
        "step_ratio": {name: sides[BEFORE]["step_s"] / sides[name]["step_s"] for name in sides if name != BEFORE},
    }  # fmt: skip


def table(found: dict, markdown: bool) -> str:
    """A line per side: idle fraction (overall and per role), seconds of a step, idle ratio to `before`."""
    lines = []
    for name, side in found["sides"].items():
        idle = {key.split("/")[1]: share for key, share in side["idle"].items()}
        roles = ", ".join(f"{role} {share:.0%}" for role, share in sorted(idle.items()) if role != "idle_fraction")
        ratio = found["idle_ratio"].get(name)
        cells = [name, f"{idle['idle_fraction']:.1%} idle", roles, f"{side['step_s']:.2f} s per step",
                 "" if ratio is None else f"{ratio:.2f} × as idle"]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |" if markdown else "  ".join(cells))
    return "\n".join(lines)


def main():
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side; default: %(default)s")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each run; default: %(default)s")
    parser.add_argument(
        "--sides", default=",".join(SIDES), help="sides, separated by commas; before always runs; default: %(default)s"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    parser.add_argument("--markdown", action="store_true", help="print rows of a Markdown table")
    parser.add_argument("flags", nargs="*", help="flags of megarl.train_rl, after --")
    args = parser.parse_args()
    args.sides = list(dict.fromkeys([BEFORE, *args.sides.split(",")]))
    if unknown := set(args.sides) - set(SIDES):
        parser.error(f"--sides {','.join(sorted(unknown))}: allowed are {', '.join(SIDES)}")
    if min(args.rounds, args.steps) < 1:
        parser.error(f"--rounds {args.rounds}, --steps {args.steps}: must be at least 1")
    found = measure(args)
    print(table(found, args.markdown))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
