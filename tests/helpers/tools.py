"""Tools as modules, and the smallest shape of a benchmark."""

import importlib.util
from pathlib import Path

from tools.bench import common

TOOLS = Path(__file__).parents[2] / "tools"


def load_tool(name):
    """tools/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SMALL = common.Shape(layers=2, hidden=32, ffn=48, vocab=40, heads=4, groups=2)
