"""The messages of docs/failures.md are those of the code."""

import ast
import re

import pytest

from tests.helpers import documents
from tests.helpers.programs import ROOT

PAGE = ROOT / "docs" / "failures.md"
FEWEST = 40
HOLE = "…"


def code_texts() -> list[str]:
    """The texts of the programs: literals, with a `HOLE` for each value, and the lines of the scripts."""
    found = []
    for path in sorted((ROOT / "megarl").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(v.value if isinstance(v, ast.Constant) else HOLE for v in node.values))
    for path in sorted((ROOT / "launch").glob("*.sh")):
        found += [re.sub(r"\$\{[^}]*\}|\$\w+", HOLE, line) for line in path.read_text().split("\n")]
    return found


def is_in_code(message: str, texts: list[str]) -> bool:
    """Whether each piece between two holes is in a text, and one of at least nine letters.

    A message may be made of several texts: of a rule, the flag and the reason.
    """
    pieces = [piece.strip(" :;,.?()") for piece in message.split(HOLE)]
    pieces = [piece for piece in pieces if len(piece) > 2]
    return max(map(len, pieces), default=0) >= 9 and all(any(piece in text for text in texts) for piece in pieces)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return code_texts()


def messages() -> list[str]:
    """The first column of every table."""
    lines = documents.text_of(PAGE).split("\n")
    rows = [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| `")]
    return [row.strip().strip("`") for row in rows]


def test_every_message_is_in_the_code(texts):
    gone = [message for message in messages() if not is_in_code(message, texts)]
    assert not gone, "\n".join(gone)
    assert len(messages()) >= FEWEST and len(set(messages())) == len(messages())


def test_every_message_has_a_cause_and_a_cure():
    rows = [line for line in documents.text_of(PAGE).split("\n") if line.startswith("| `")]
    assert all(len([cell for cell in row.strip("| ").split(" | ") if cell.strip()]) == 3 for row in rows)


def test_invented_messages_are_found(texts):
    for message in (
        "the flux capacitor is empty",
        "…: unknown flag; did you intend …?",
        "rank …",
        "failed in …: the moon",
    ):
        assert not is_in_code(message, texts)
