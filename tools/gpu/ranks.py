"""Several ranks on one device: programs of `program_rows.WORLDS` against a CPU's, with a time limit for each.

`python -m tools.gpu.ranks --backend nccl` needs an NCCL of 2.30 or later, whose switch for several ranks on a device is
set here. One of `tools/gpu/build_nccl.sh` is taken from `build/nccl`, in place of torch's. `--backend staged` is gloo
over host copies (`staged.py`); with `--not-passed` it leaves out what NCCL has passed in the run before.
"""

import argparse
import ctypes
import json
import os

import torch

from tools.gpu import program_rows, programs, report, run_all, sized

LIBRARY = programs.ROOT / "build" / "nccl" / "libnccl.so.2"
PASSED = programs.ROOT / "build" / "gpu_ranks.json"  # names of worlds that NCCL has passed
LIMITS = sized(programs.Limits(at_once=4, begin=55, seconds=40), programs.Limits(1, 1e4, 600))
FIRST = 2, 30  # NCCL with several ranks on a device


def nccl_variables() -> dict[str, str]:
    """Variables of programs whose ranks share a device by NCCL.

    Raises:
        RuntimeError: this NCCL takes one rank on a device.
    """
    variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
    found = torch.cuda.nccl.version()
    if LIBRARY.exists():
        number = ctypes.c_int()
        ctypes.CDLL(str(LIBRARY)).ncclGetVersion(ctypes.byref(number))
        found = number.value // 10_000, number.value // 100 % 100, number.value % 100
        # Before torch's own, to which its library's path leads.
        variables["LD_PRELOAD"] = ":".join(filter(None, [str(LIBRARY), os.environ.get("LD_PRELOAD")]))
    report(nccl=".".join(map(str, found)), is_own=LIBRARY.exists())
    if found < FIRST:
        raise RuntimeError(
            f"NCCL {'.'.join(map(str, found))} takes one rank on a device: tools/gpu/build_nccl.sh builds one of 2.30"
        )
    return variables


def check(backend: str, only: list[str]) -> bool:
    """Runs the worlds; False if one is at fault, refused, or did not begin."""
    os.environ.update(nccl_variables() if backend == "nccl" else {"MEGARL_DEVICE_BACKEND": backend})
    found = programs.compared("worlds", only, LIMITS)
    for name, row in found.items():
        report(world=name, backend=backend, **row)
    passed = [name for name, row in found.items() if "norms" in row and "fault" not in row]
    if backend == "nccl":
        PASSED.parent.mkdir(exist_ok=True)
        PASSED.write_text(json.dumps(passed))
    report(backend=backend, worlds=len(found), passed=passed)
    return len(passed) == len(found) > 0


def main():
    """The stage."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.ranks", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("nccl", "staged"), required=True)
    parser.add_argument("--not-passed", action="store_true", help="leave out what NCCL has passed in the run before")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="worlds whose name has this text")
    args = parser.parse_args()
    passed = json.loads(PASSED.read_text()) if args.not_passed and PASSED.exists() else []
    names = [name for name in program_rows.worlds(False) if not args.only or any(text in name for text in args.only)]
    left = [name for name in names if name not in passed]
    report(backend=args.backend, worlds=left, passed_before=[name for name in names if name in passed])
    run_all({args.backend: lambda: check(args.backend, left)} if left else {})


if __name__ == "__main__":
    main()
