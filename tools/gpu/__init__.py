"""Stages of tools/gpu_check.sh. Each prints its findings as lines of JSON, as soon as it has them."""

import json
import sys
from collections.abc import Callable


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
