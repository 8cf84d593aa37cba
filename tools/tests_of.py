"""Which tests reach a file: what to run after a change of it.

    python tools/tests_of.py megarl/roles/actor.py               # by at most two imports
    python tools/tests_of.py --within 9 megarl/roles/actor.py    # all

A line for each test file, nearest first: how many imports lead to it, and its path (0: it is the mirrored path, or a
planted fault of the file names it). Imports within functions count, and names of modules in strings, as flags have of
plug-ins. A file that is no Python is reached by the modules in which its name stands.
"""

import argparse
import ast
import functools
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import planted_faults

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("megarl", "tools", "tests")
NAME = re.compile(r"\b(?:megarl|tools|tests)(?:\.\w+)+")


def _file_of(module: str) -> Path | None:
    """The file of a module, or of the longest part of its name that is one."""
    while module:
        path = ROOT / module.replace(".", "/")
        for found in (path.with_suffix(".py"), path / "__init__.py"):
            if found.is_file():
                return found
        module = module.rpartition(".")[0]
    return None


def imports(path: Path) -> set[Path]:
    """The project's files that a Python file imports, or names in strings."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(NAME.findall(node.value))
    return {file for name in names if name.startswith(FOLDERS) and (file := _file_of(name)) and file != path}


@functools.cache
def importers() -> dict[Path, set[Path]]:
    """File -> the files that import it."""
    found: dict[Path, set[Path]] = {}
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for imported in imports(path):
            found.setdefault(imported, set()).add(path)
    return found


def _nearest(path: Path) -> set[Path]:
    """The tests at the mirrored path, and those that planted faults of the file name."""
    inside = path.relative_to(ROOT)
    room = "unit" if inside.parts[0] == "megarl" else inside.parts[0]
    found = {ROOT / "tests" / room / Path(*inside.parts[1:]).with_name(f"test_{path.stem}.py")}
    for fault in planted_faults.faults():
        if fault["file"] == str(inside):
            found |= {ROOT / test for test in fault.get("tests", "").split()}
    return {file for each in found for file in ([each] if each.is_file() else each.rglob("test_*.py"))}


def reached(path: Path) -> dict[Path, int]:
    """Test file -> how many imports lead from it to the file."""
    found, seen, distance = dict.fromkeys(_nearest(path), 0), {path}, 0
    here = importers().get(path, set())
    if path.suffix != ".py":
        here = {file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") if path.name in file.read_text()}
    while here := here - seen:
        distance += 1
        for file in here:
            if file.name.startswith("test_"):
                found.setdefault(file, distance)
        seen |= here
        here = {file for each in here for file in importers().get(each, ())}
    return found


def main(argv: list[str]) -> int:
    """Prints the tests; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("file", type=Path)
    parser.add_argument("--within", type=int, default=2, metavar="N", help="imports, at most; default 2")
    options = parser.parse_args(argv)
    path = options.file.resolve()
    if not path.is_file() or not path.is_relative_to(ROOT):
        print(f"tests_of: error: {options.file}: is no file of {ROOT}", file=sys.stderr)
        return 2
    for test, distance in sorted(reached(path).items(), key=lambda item: (item[1], item[0])):
        if distance <= options.within:
            print(f"{distance} {test.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
