"""Whole steps of megarl beside those of a peer's trainer, which count only if the losses of both agree."""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from tools.bench import common, step

Run = Callable[[Path, str, int], tuple[list[float], list[float]]]  # (folder, case, steps) -> (seconds, losses) by step


def main(
    argv: list[str] | None, about: str, program: str, cases: dict, runs: dict[str, Run],
    make_folder: Callable[[Path, str], None], differences: Callable[[str, list, list], list[float]],
    tolerance: Callable[[str], float], sizes: Callable[[str], dict], shape: common.Shape,
):  # fmt: skip
    """Parses flags, measures a case, or runs one side of it, prints.

    Args:
        about: the program's docstring; `program`: its file.
        runs: by side.
        make_folder: makes what both sides read.
        differences: (case, megarl's losses, the peer's) -> how far they are apart; at most `tolerance` of the case.
        sizes: what a step of a case works on, for the report.
    """
    made = common.parser(about, cases, rounds=3)
    made.add_argument("--steps", type=int, default=4, help="measured steps per round; default: %(default)s")
    made.add_argument("--side", choices=[common.OURS, *step.PEERS], help="run only this side, in --folder")
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = common.parsed(made, argv)
    if args.side:
        seconds, losses = runs[args.side](args.folder, args.case, step.WARM_UP + args.steps)
        step.write_seconds(args.folder, seconds)
        (args.folder / f"losses-{args.side}.json").write_text(json.dumps(losses))
        return
    common.installed(step.PEERS)
    seconds, losses = _measure(args, program, make_folder)
    found = differences(args.case, losses[common.OURS], losses["trl"])
    print(f"losses {', '.join(f'{loss:.6f}' for loss in losses[common.OURS])}; largest difference {max(found):.1e}")
    if max(found) > tolerance(args.case):
        raise common.Unusable(f"the losses differ: {losses}")
    common.publish(common.report(args.case, seconds, sizes(args.case)), args, shape)
    torch.distributed.destroy_process_group()


def _measure(args: argparse.Namespace, program: str, make_folder) -> tuple[dict[str, list], dict[str, list]]:
    """(seconds of all measured steps, losses of the last round) by side; the sides run alternately, each in a new
    process."""
    rounds: dict[str, list] = {common.OURS: [], "trl": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_folder(folder, args.case)

        def clock(side: str) -> float:
            options = ["--case", args.case, "--steps", str(args.steps)]
            rounds[side].append(step.in_process(program, side, folder, 1, options))
            return sum(rounds[side][-1]) / len(rounds[side][-1])

        common.alternate({side: lambda side=side: clock(side) for side in rounds}, args.rounds)
        losses = {side: json.loads((folder / f"losses-{side}.json").read_text()) for side in rounds}
    return {side: sum(found, []) for side, found in rounds.items()}, losses
