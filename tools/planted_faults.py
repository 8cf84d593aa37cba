"""Plants the faults of tests/planted_faults.yaml one after another, and says which test of the default tier finds each.

    python tools/planted_faults.py                       every fault, first with the tests of its room, then with all
    python tools/planted_faults.py --faults NAME [NAME …]
    python tools/planted_faults.py --tier long --rooms-only

Each fault is planted in a clone of HEAD, so what is not committed is not tested. A fault that the tests of its room
find takes half a minute, each other one the whole tier. Exit status: 1 if a fault is not found.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
FAULTS = ROOT / "tests" / "planted_faults.yaml"
TIERS = {"default": "not long and not nightly and not gpu", "long": "long and not gpu"}


def faults() -> list[dict[str, str]]:
    """The faults: `name`, `room`, `file`, `old` text, `new` text, `effect`; `tests`, where they are not the room's."""
    return yaml.safe_load(FAULTS.read_text())


def planted(fault: dict[str, str], text: str) -> str:
    """The text of a file with a fault. ValueError if its place is gone or ambiguous, or the result is no Python."""
    if text.count(fault["old"]) != 1:
        raise ValueError(f"{fault['name']}: {fault['file']} has its text {text.count(fault['old'])} times, not once")
    changed = text.replace(fault["old"], fault["new"])
    if fault["file"].endswith(".py"):
        ast.parse(changed)
    return changed


def tests_of(fault: dict[str, str]) -> list[str]:
    """Test files and folders of a fault's room. ValueError if one does not exist."""
    found = fault.get("tests", "").split() or [f"tests/unit/{fault['room']}"]
    if missing := [path for path in found if not (ROOT / path).exists()]:
        raise ValueError(f"{fault['name']}: no tests at {', '.join(missing)}; name others with `tests`")
    return found


def first_failure(clone: Path, tier: str, paths: list[str]) -> str | None:
    """Name of the first test of the tier that fails in these paths; None if all pass.

    RuntimeError if pytest itself failed, which would look like a fault that was found.
    """
    environment = os.environ | {"PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", TIERS[tier], *paths]
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
    if done.returncode in (0, 5):  # 5: the paths have no test of this tier
        return None
    if done.returncode > 2:
        raise RuntimeError(f"pytest ended with status {done.returncode}: {done.stdout[-500:]}{done.stderr[-500:]}")
    named = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return named[1] if named else f"pytest ended with status {done.returncode}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", nargs="+", help="names; default: all")
    parser.add_argument("--tier", choices=TIERS, default="default")
    parser.add_argument("--rooms-only", action="store_true", help="run the tests of a fault's room alone")
    options = parser.parse_args(argv)
    chosen = [fault for fault in faults() if not options.faults or fault["name"] in options.faults]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
        for fault in chosen:
            file = clone / fault["file"]
            text = file.read_text()
            file.write_text(planted(fault, text))
            test = first_failure(clone, options.tier, tests_of(fault))
            if test is None and not options.rooms_only:
                test = first_failure(clone, options.tier, ["tests"])
            file.write_text(text)
            missed += [fault["name"]] * (test is None)
            print(f"{fault['name']}: {test or 'NOT FOUND'}", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} found; not found: {', '.join(missed) or 'none'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
