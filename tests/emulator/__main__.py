"""`python -m tests.emulator [--ranks N] [--interpret] MODULE FLAG…`: a program of megarl on emulated devices."""

import argparse
import subprocess
import sys

from tests.emulator import build


def main() -> int:
    """Starts the program's ranks with the emulator's libraries; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tests.emulator", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--interpret", action="store_true", help="Triton's kernels by its interpreter: slow")
    parser.add_argument("module")
    parser.add_argument("flags", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if reason := build.absence():
        sys.exit(f"tests.emulator: {reason}")
    launcher = [sys.executable, "-W", "ignore"]
    if options.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    command = [*launcher, "-m", "tests.emulator.run", options.module, *options.flags]
    return subprocess.run(command, env=build.environment(options.interpret)).returncode


if __name__ == "__main__":
    sys.exit(main())
