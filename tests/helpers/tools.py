"""Tools as modules and as programs, and the smallest shape of a benchmark."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from tools import convert
from tools.bench import common

TOOLS = Path(__file__).parents[2] / "tools"
SMALL = common.Shape(layers=2, hidden=32, ffn=48, vocab=40, heads=4, groups=2)


def load_tool(name):
    """tools/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_tool(name, *arguments, **environment):
    """Runs tools/NAME.py as a user does; output as text."""
    command = [sys.executable, str(TOOLS / f"{name}.py"), *map(str, arguments)]
    root = str(TOOLS.parent)
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root, **environment}
    )


def converted(rank: int, *argv) -> int:
    """The exit status of the converter on a rank of a running world; `argv`: after the program's name."""
    sys.argv = ["convert.py", *map(str, argv)]
    try:
        convert.main()
    except SystemExit as ended:
        return ended.code or 0
    return 0
