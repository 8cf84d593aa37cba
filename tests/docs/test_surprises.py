"""docs/migrating.md and findings/: tests and scripts that the surprises name exist, and scripts have their form."""

import ast
import re

import pytest

from tests.helpers.pages import documents
from tests.helpers.programs import ROOT

TEXT = documents.text_of(ROOT / "docs" / "migrating.md").partition("## Surprises of libraries")[2]
SCRIPTS = sorted((ROOT / "findings").glob("*.sh"))


def missing_tests(text: str) -> list[str]:
    """The names `tests/….py::test_…` of a text that are no functions of these files."""
    missing = []
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        tree = ast.parse((ROOT / path).read_text()) if (ROOT / path).is_file() else ast.Module([], [])
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{path}::{name}")
    return missing


def test_every_row_names_a_test_that_exists():
    rows = [line for line in TEXT.split("\n") if line.startswith("| ")][1:]
    assert len(rows) > 4 and all("::test_" in row for row in rows)
    assert missing_tests(TEXT) == []


def test_a_missing_test_is_found():
    text = "`tests/docs/test_surprises.py::test_nothing` `tests/docs/no.py::test_a`"
    assert missing_tests(text) == ["tests/docs/test_surprises.py::test_nothing", "tests/docs/no.py::test_a"]


def test_every_script_that_the_page_names_exists():
    named = set(re.findall(r"`findings/(\w+\.sh)`", TEXT))
    assert named and named <= {path.name for path in SCRIPTS}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_has_the_form_of_the_rules(path):
    text = path.read_text()
    assert re.search(r"^# .*\d+\.\d+", text, re.MULTILINE) and "\n# Output: " in text and "assert " in text
    pins = re.search(r"^need (.+)$", text, re.MULTILINE)[1].split()
    assert pins and all(re.fullmatch(r"[\w-]+==[\d.]+", pin) for pin in pins)
    assert "megarl" not in text.lower() and "http" not in text
