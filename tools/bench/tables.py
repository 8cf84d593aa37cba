"""How a benchmark's lines are printed, and the flags that say where; imports nothing heavy, since start-up is timed."""

import argparse
from pathlib import Path


def add_output_flags(parser: argparse.ArgumentParser):
    """--markdown and --json."""
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the numbers")


def whole_table(lines: list[list[str]], markdown: bool, width: int) -> str:
    """Lines of cells, the first of them names: in columns of `width`, or as a Markdown table."""
    if not markdown:
        return "\n".join("".join(f"{cell:>{width}}" for cell in line) for line in lines)
    names, *rows = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in (names, ["---"] * len(names), *rows))
