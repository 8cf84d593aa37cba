"""Restarts of the quickstart on 4 ranks: seconds from a rank's SIGKILL to the next rollout, of two versions of megarl.

    git worktree add --detach /tmp/before COMMIT
    PYTHONPATH=. python tools/bench/restart.py --than /tmp/before [--rounds 3] [--json FILE] [--markdown]

Each run saves a checkpoint each step and is killed once, when the one of step 2 is complete: rank 3 then generates step
3. The launcher starts the ranks again, and the run ends after step 4. The times are those of the second start, from the
run's timeline.json. Both sides use the same data, tokenizer and warm start, and alternate; each runs once before the
first round. A side that needs its kernels compiled does that then.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tools.bench import startup
from tools.bench.tables import add_output_flags, whole_table

RANKS = 4
KILLED_AFTER, STEPS = 2, 4  # steps
LIMIT = 300  # seconds that a run may take until its kill


def killed_run(tree: Path, warm: Path, save: Path) -> dict[str, float]:
    """Runs the quickstart of a version and kills its last rank once.

    Returns seconds from the kill to the end of the second start's set-up, which is the beginning of its first rollout,
    and to the end of this rollout.
    """
    start = startup.Quickstart(warm, RANKS, tree)
    flags = [*start.flags, "--train-iters", str(STEPS), "--save-interval", "1", "--save", str(save)]
    environment = startup.environment(NPROC=str(RANKS), MAX_RESTARTS="1") | {"PYTHONPATH": str(tree)}
    log = save.with_suffix(".log")
    with log.open("wb") as output:
        run = subprocess.Popen(
            ["bash", "launch/run.sh", "train_rl", *flags], cwd=tree, env=environment, stdout=output, stderr=output
        )
    latest, began = save / "checkpoints" / "latest", time.monotonic()
    while not (latest.exists() and latest.read_text().strip().endswith(str(KILLED_AFTER))):
        if run.poll() is not None or time.monotonic() - began > LIMIT:
            run.kill()
            raise SystemExit(f"restart.py: {tree}: step {KILLED_AFTER} never came:\n{log.read_text()}")
        time.sleep(0.01)
    killed = time.time()
    os.kill(last_rank(run.pid), signal.SIGKILL)
    if run.wait() or "restart 1 of" not in log.read_text():
        raise SystemExit(f"restart.py: {tree}: no restart, or it failed:\n{log.read_text()}")
    return startup.first_rollout(save, killed)


def last_rank(launcher: int) -> int:
    """Process of the last rank that the launcher has forked; the launch script is the launcher by then."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ranks = [pid for pid in map(int, children) if b"megarl.launcher" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    if len(ranks) != RANKS:
        raise SystemExit(f"restart.py: the launcher has {len(ranks)} ranks instead of {RANKS}")
    return max(ranks)


def measure(trees: dict[str, Path], warm: Path, rounds: int) -> list[dict]:
    """A row a round with the times of each side, which alternate."""
    rows = []
    for number in range(-1, rounds):
        row = {}
        for name in trees if number % 2 == 0 else reversed(trees):
            row[name] = killed_run(trees[name], warm, warm / f"{name}-{number}")
            print(f"  round {number + 1}, {name}: {row[name]['set_up_s']:.2f} s", flush=True)
        rows.append(row)
    return rows[1:]


def table(rows: list[dict], markdown: bool) -> str:
    """Median seconds to the next rollout, and to its end, of each side; the ratio of the first."""
    sides = {name: startup.medians([row[name] for row in rows]) for name in rows[0]}
    ratio = statistics.median(row["now"]["set_up_s"] / row["before"]["set_up_s"] for row in rows)
    lines = [["side", "next rollout begins", "it ends", "ratio"]]
    for name, seconds in sides.items():
        lines.append([name, *(f"{value:.2f} s" for value in seconds.values()), f"{ratio:.2f}" * (name == "now")])
    return whole_table(lines, markdown, 22)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--than", type=Path, required=True, metavar="FOLDER", help="a checkout of the other version")
    parser.add_argument("--rounds", type=int, default=3, help="kills of each side; default: %(default)s")
    add_output_flags(parser)
    args = parser.parse_args(argv)
    if args.rounds < 1 or not (args.than / "launch" / "run.sh").exists():
        parser.error(f"--than {args.than} --rounds {args.rounds}: allowed are a checkout and at least 1 round")
    with startup.warm_start() as folder:
        rows = measure({"before": args.than.resolve(), "now": startup.ROOT}, folder, args.rounds)
    print(table(rows, args.markdown))
    if args.json:
        args.json.write_text(json.dumps({"cpus": os.cpu_count(), "rounds": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
