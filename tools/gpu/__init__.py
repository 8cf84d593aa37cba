"""Stages of tools/gpu_check.sh. Each prints its findings as lines of JSON, as soon as it has them."""

import json
import os
import sys
from collections.abc import Callable

SIZES = "GPU_CHECK_SIZES"  # small: as an emulated device can do
THROUGH = "GPU_CHECK_THROUGH"  # a module that runs others: the emulator sets it


def sized[T](real: T, small: T) -> T:
    """A size of a stage: the real one, or a small one to try the stage with."""
    return small if os.environ.get(SIZES) == "small" else real


def command(module: str, *flags: str, through: bool = True) -> list[str]:
    """A process of a stage. `through`: on emulated devices it is emulated, too."""
    runner = os.environ.get(THROUGH, "").split() * through
    return [sys.executable, "-W", "ignore", "-m", *runner, module, *flags]


def without_device() -> dict[str, str]:
    """The environment of a process that sees no device, not even an emulated one."""
    hidden = {"MEGARL_DEVICE_BACKEND"}
    hidden |= {THROUGH, "LD_PRELOAD", "LD_LIBRARY_PATH", "TRITON_INTERPRET"} if THROUGH in os.environ else set()
    return {name: value for name, value in os.environ.items() if name not in hidden} | {"CUDA_VISIBLE_DEVICES": ""}


def report(**findings):
    """Prints findings as a line of JSON."""
    print(json.dumps(findings), flush=True)


def run_all(cases: dict[str, Callable[[], bool | None]]):
    """Runs all cases and ends the process with the number of those that failed; one that fails does not stop the rest.

    A case fails if it raises, or returns False: what it found is out of bounds.
    """
    failures = 0
    for name, run in cases.items():
        try:
            failures += run() is False
        except Exception as error:
            failures += 1
            report(case=name, failure=f"{type(error).__name__}: {error}"[-2000:])
    sys.exit(failures)
