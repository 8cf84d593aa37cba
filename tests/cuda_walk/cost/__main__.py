"""`python -m tests.cuda_walk.cost --world-size N FLAG …`: the predicted time of the phases of a step of train_rl.

With `--launches` alone: kernels that are launched in models whose numbers of launches have ceilings.

Exit status: 0; 2 for wrong flags, and for a run that cannot be predicted.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from megarl.errors import ArgumentParser
from tests.cuda_walk.start import ROOT, compiler, stand_ins


def build_parser() -> ArgumentParser:
    """The tool's own flags; all others are those of train_rl."""
    parser = ArgumentParser(prog="tests.cuda_walk.cost", allow_abbrev=False, epilog="Other flags are train_rl's.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--world-size", type=int, help="ranks of the run")
    what.add_argument("--launches", action="store_true", help="the table of ceilings; takes no other flag")
    parser.add_argument("--ranks-per-node", type=int, help="for a role map of nodes; default: all on one node")
    parser.add_argument("--vocab-size", type=int, help="default: that of the folder or tokenizer")
    parser.add_argument("--operators", type=int, default=0, help="also print the slowest operators of each phase")
    return parser


def main() -> int:
    """Starts the walk in a process without CUDA's libraries; returns its exit status."""
    if compiler is None:
        sys.exit("tests.cuda_walk.cost: needs a C compiler")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", "-m", "tests.cuda_walk.cost.run", *sys.argv[1:]]
        return subprocess.run(command, cwd=ROOT, env=stand_ins(Path(folder))).returncode


if __name__ == "__main__":
    sys.exit(main())
