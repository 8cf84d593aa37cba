"""Scripts of launch/, run in the environment of the tests."""

import subprocess
import sys
from pathlib import Path

from tests.helpers.programs import ROOT, environment


def launch(arguments: list[str], name: str = "run", root: Path = ROOT, **variables: str):
    """Runs a script in the environment that the tests run in, with no other variables of the scripts than these."""
    own = dict.fromkeys(("CONFIG", "SEED", "SAVE", "NPROC", "NNODES", "MAX_RESTARTS", "PYTHON"), "")
    env = environment(MEGARL_VENV=sys.prefix, **own | variables)
    command = ["bash", str(root / "launch" / f"{name}.sh"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
