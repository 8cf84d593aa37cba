"""Makes training and held-out prompt files for the built-in environments of multi-turn rollouts.

    python tools/make_agent_prompts.py --task guess-number --train 512 --heldout 64 --out data/guess
    python tools/make_agent_prompts.py --task products --train 4000 --heldout 200 --out data/products3
    python tools/make_agent_prompts.py --task frozen-lake --train 500 --heldout 50 --out data/lake

Writes to DIR train.jsonl, heldout.jsonl (each line: prompt, answer, metadata) and prompts.json, in the format of
tools/make_prompts.py; the same arguments give the same bytes. --conversations N also writes conversations.jsonl, for a
warm start: N episodes of a player who knows the form of an answer and little else (`_careless_players.py`).

Pairs of factors, in either order, and maps are in one of the files. All lines of guess-number ask the same: the seed of
an episode draws its number. Maps have a way to the goal, whose length is `metadata.shortest`; `--standard-map` writes
gymnasium's own 4x4 map on each line instead.
"""

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.errors import ArgumentParser, UsageError, refuses_in_one_line, writing
from tools._careless_players import conversations
from tools.make_prompts import split, told, write_files

FACTORS = range(100, 1000)
STANDARD_MAP = ["SFFF", "FHFH", "FFFH", "HFFG"]
_SIDE, _SAFE = 4, 0.75  # of a map: rows and columns, the chance of a field to be no hole
_LAKE = (
    "A frozen lake, row by row: {}. S is the start, G the goal, F ice, H a hole. Row and column 0 are at the top left. "
    "Reach the goal without falling into a hole. Say one of left, down, right, up in each turn."
)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--task", required=True, choices=sorted(TASKS), help="what to ask")
    parser.add_argument("--train", type=int, required=True, help="number of training prompts")
    parser.add_argument("--heldout", type=int, required=True, help="number of held-out prompts")
    parser.add_argument("--seed", type=int, default=1, help="of the questions and the split; default: %(default)s")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the three files")
    parser.add_argument("--low", type=int, default=1, help="lowest number of guess-number; default: %(default)s")
    parser.add_argument("--high", type=int, default=15, help="highest number of guess-number; default: %(default)s")
    parser.add_argument("--guesses", type=int, default=4, help="turns of guess-number; default: %(default)s")
    parser.add_argument("--standard-map", action="store_true", help="of frozen-lake: the same map on each line")
    parser.add_argument("--conversations", type=int, default=0, help="episodes for a warm start; default: none")
    parser.add_argument("--prompt", help="text of each line instead of the task's own, with {} for the expression, the"
                        " map, or nothing")  # fmt: skip
    arguments = parser.parse_args(argv)
    for name, least in (("train", 1), ("heldout", 1), ("seed", 0), ("low", 0), ("guesses", 1), ("conversations", 0)):
        if getattr(arguments, name) < least:
            raise UsageError(f"--{name} {getattr(arguments, name)}: must be at least {least}")
    if arguments.high < arguments.low:
        raise UsageError(f"--high {arguments.high}: must be at least --low {arguments.low}")
    return arguments


def guess_lines(arguments: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    """Lines that differ by their number only."""
    metadata = {name: getattr(arguments, name) for name in ("low", "high", "guesses")}
    text = arguments.prompt or f"Guess my number from {arguments.low} to {arguments.high}."
    return [
        {"prompt": text, "metadata": {**metadata, "question_id": _id(f"guess {number}")}} for number in range(count)
    ]


def product_lines(arguments: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    """Lines of different pairs of factors."""
    available = len(FACTORS) * (len(FACTORS) + 1) // 2
    if count > available:
        raise UsageError(f"--train and --heldout {count}: there are {available} products of three-digit numbers")

    def draw(generator: random.Random) -> tuple[str, dict[str, Any]]:
        a, b = generator.choice(FACTORS), generator.choice(FACTORS)
        line = {
            "prompt": (arguments.prompt or "What is {}?").replace("{}", f"{a} * {b}"),
            "answer": str(a * b),
            "metadata": {"expression": f"{a}*{b}"},
        }
        return f"{min(a, b)} * {max(a, b)}", line

    return _distinct(draw, arguments.seed, count)


def lake_lines(arguments: argparse.Namespace, count: int) -> list[dict[str, Any]]:
    """Lines of different maps, or of the standard one."""

    def line(rows: list[str]) -> dict[str, Any]:
        metadata = {"map": rows, "shortest": shortest_way(rows)}
        text = (arguments.prompt or _LAKE).replace("{}", " ".join(rows))
        return {"prompt": text, "metadata": metadata}

    if arguments.standard_map:
        lines = [line(STANDARD_MAP) for _ in range(count)]
        for number, each in enumerate(lines):
            each["metadata"]["question_id"] = _id(f"lake {number}")
        return lines

    def draw(generator: random.Random) -> tuple[str, dict[str, Any]] | None:
        letters = ["F" if generator.random() < _SAFE else "H" for _ in range(_SIDE * _SIDE)]
        letters[0], letters[-1] = "S", "G"
        rows = ["".join(letters[start : start + _SIDE]) for start in range(0, _SIDE * _SIDE, _SIDE)]
        return None if shortest_way(rows) is None else (" ".join(rows), line(rows))

    return _distinct(draw, arguments.seed, count)


TASKS = {"guess-number": guess_lines, "products": product_lines, "frozen-lake": lake_lines}


def shortest_way(rows: list[str]) -> int | None:
    """Steps from S to G around the holes of a map; None if there is no way."""
    fields = {(r, c): letter for r, row in enumerate(rows) for c, letter in enumerate(row) if letter != "H"}
    reached = {place for place, letter in fields.items() if letter == "S"}
    steps = 0
    while not any(fields[place] == "G" for place in reached):
        beside = {(r + dr, c + dc) for r, c in reached for dr, dc in ((0, 1), (1, 0), (0, -1), (-1, 0))}
        further = reached | beside & fields.keys()
        if further == reached:
            return None
        reached, steps = further, steps + 1
    return steps


def _distinct(draw: Callable, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` lines of different questions; `draw` gives (question, line), or None. UsageError if there are fewer."""
    generator, lines = random.Random(seed), {}
    for _ in range(100 * count + 1000):
        drawn = draw(generator)
        if drawn is not None and drawn[0] not in lines:
            question, line = drawn
            line["metadata"]["question_id"] = _id(question)
            lines[question] = line
        if len(lines) == count:
            return list(lines.values())
    raise UsageError(f"--train and --heldout {count}: there are hardly more than {len(lines)} different questions")


def _id(question: str) -> str:
    return hashlib.sha256(question.encode()).hexdigest()[:16]


@refuses_in_one_line("make_agent_prompts")
def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    with writing(f"--out {arguments.out}"):
        lines = TASKS[arguments.task](arguments, arguments.train + arguments.heldout)
        train, heldout = split(lines, arguments.heldout, arguments.seed)
        made_from = {name: value for name, value in vars(arguments).items() if name not in ("train", "heldout", "out")}
        folder = Path(arguments.out)
        write_files(folder, train, heldout, made_from)
        if arguments.conversations:
            played = conversations(arguments.task, train, arguments.conversations, arguments.seed)
            (folder / "conversations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in played))
    same_question = arguments.task == "guess-number" or arguments.standard_map
    text = f"{len(train)} train and {len(heldout)} held-out prompts of {arguments.task}"
    return told("make_agent_prompts", folder, text, is_apart=not same_question)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
