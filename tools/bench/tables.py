"""Tables and output flags of the benchmarks; imports nothing heavy, since start-up is timed."""

import argparse
from pathlib import Path


def add_output_flags(parser: argparse.ArgumentParser):
    """Adds --markdown and --json."""
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")


def whole_table(lines: list[list[str]], markdown: bool, width: int) -> str:
    """Formats lines of cells, a header first, in columns of `width` or as a Markdown table."""
    if not markdown:
        return "\n".join("".join(f"{cell:>{width}}" for cell in line) for line in lines)
    names, *rows = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in (names, ["---"] * len(names), *rows))
