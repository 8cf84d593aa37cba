"""Makes training and held-out prompt files that ask for products of two numbers from 2 to 12, in several wordings.

    python tools/make_products.py --seed 1 --out data/products

Writes to DIR train.jsonl, heldout.jsonl (each line: prompt, answer, metadata) and prompts.json, in the format of
tools/make_prompts.py. A third of the 66 pairs of factors is held out, in either order and in all wordings. The reward
--reward regex --reward-pattern '(\\d+)\\D*\\Z' reads the last number of a response. The same seed gives the same bytes.
"""

import argparse
import hashlib
import itertools
import sys
from pathlib import Path
from typing import Any

from megarl.errors import ArgumentParser, UsageError, refuses_in_one_line, writing
from tools.make_prompts import split, told, write_files

FACTORS = range(2, 13)
WORDINGS = (
    "What is {} * {}? Answer with a number.",
    "What is {} x {}? Answer with a number.",
    "What is {} times {}? Answer with a number.",
)
HELD_OUT = 22  # pairs


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=1, help="random seed of the split; default: %(default)s")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the three files")
    arguments = parser.parse_args(argv)
    if arguments.seed < 0:
        raise UsageError(f"--seed {arguments.seed}: must not be negative")
    return arguments


def pairs() -> list[dict[str, Any]]:
    """The pairs of factors, each with the id by which they are split."""
    return [
        {"factors": (a, b), "metadata": {"question_id": hashlib.sha256(f"{a} * {b}".encode()).hexdigest()[:16]}}
        for a, b in itertools.combinations_with_replacement(FACTORS, 2)
    ]


def prompt_lines(pair: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a pair: all wordings, in both orders."""
    a, b = pair["factors"]
    return [
        {"prompt": wording.format(*order), "answer": str(a * b), "metadata": pair["metadata"]}
        for order in sorted({(a, b), (b, a)})
        for wording in WORDINGS
    ]


@refuses_in_one_line("make_products")
def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    with writing(f"--out {arguments.out}"):
        train, heldout = ([line for pair in part for line in prompt_lines(pair)]
                          for part in split(pairs(), HELD_OUT, arguments.seed))  # fmt: skip
        folder = Path(arguments.out)
        write_files(folder, train, heldout, {"task": "products", "seed": arguments.seed})
    return told(
        "make_products", folder, f"{len(train)} train and {len(heldout)} held-out prompts, no pair of factors in both"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
