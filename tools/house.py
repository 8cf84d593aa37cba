"""Counts what a reader of megarl's source has to know: files, classes, exceptions from the rules of style, pages.

    python tools/house.py            # the table
    python tools/house.py --limits   # exit status 1 if a count is above its limit in LIMITS

A limit is what the tree has now. A change may lower it, and then sets the limit to the new count; it may not raise it.
"""

import argparse
import ast
import re
import statistics
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = 60  # lines
WIDE = 8  # parameters that a function may have, without self and cls; Triton's kernels get no records
LONG = 48  # words of a sentence that tires

# What the tree may have at most.
LIMITS = {
    "files": 450,
    "files below 60 lines": 60,
    "classes": 678,
    "fmt: skip": 100,
    "star-passed local tuples": 57,
    "functions with 9 and more parameters": 1,
    "file names that occur twice": 0,
    "modules of 60 lines and more without a test of their name": 0,
    "pages": 36,
    "sentences of 48 words and more": 0,
}


def python_files(folder: str) -> list[Path]:
    """The Python files of a folder of the project, sorted."""
    return sorted((ROOT / folder).rglob("*.py"))


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters of a function, without those that Python passes and without * and **."""
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def _of_syntax(files: list[Path]) -> Counter:
    """What only the syntax tells of these files, in one walk through each, which takes long."""
    found: Counter = Counter()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found["classes"] += 1
            elif isinstance(node, ast.Call):  # a local name with a star: the reader has to look for what is in it
                stars = (each for each in node.args if isinstance(each, ast.Starred))
                found["star-passed local tuples"] += sum(isinstance(each.value, ast.Name) for each in stars)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not _is_kernel(node):
                found["functions with 9 and more parameters"] += _parameters(node) > WIDE
    return found


def _is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is compiled by Triton."""
    return any("triton.jit" in ast.unparse(each) for each in node.decorator_list)


def _repeated_names() -> int:
    names = Counter(path.name for path in python_files("megarl") if path.name != "__init__.py")
    return sum(count > 1 for count in names.values())


def _untested() -> int:
    """Modules without tests/unit/…/test_NAME.py at the path that is theirs."""
    found = 0
    for path in python_files("megarl"):
        of_package = path.relative_to(ROOT / "megarl")
        test = ROOT / "tests" / "unit" / of_package.with_name(f"test_{path.name}")
        found += path.name != "__init__.py" and _lines(path) >= SMALL and not test.exists()
    return found


def sentences(text: str) -> list[str]:
    """The sentences of a page's running text: without code, tables and headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.split("\n") if not line.lstrip().startswith(("|", "#", "<!--"))]
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[*-]|\d+\.) )", "\n".join(lines))
    return [each for part in paragraphs for each in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*])", " ".join(part.split()))]


def counts() -> dict[str, int]:
    """What is counted, by name: what has a limit, and sizes."""
    files = python_files("megarl")
    syntax = _of_syntax(files)
    sizes = [_lines(path) for path in files]
    native = [path for kind in ("*.h", "*.cpp", "*.js") for path in (ROOT / "megarl").rglob(kind)]
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    texts = {path: path.read_text(encoding="utf-8") for path in pages}
    written = [text for text in texts.values() if not text.startswith("<!-- Made by")]
    return {
        "files": len(files),
        "files below 60 lines": sum(size < SMALL for size in sizes),
        "classes": syntax["classes"],
        "fmt: skip": sum(path.read_text(encoding="utf-8").count("# fmt: skip") for path in files),
        "star-passed local tuples": syntax["star-passed local tuples"],
        "functions with 9 and more parameters": syntax["functions with 9 and more parameters"],
        "file names that occur twice": _repeated_names(),
        "modules of 60 lines and more without a test of their name": _untested(),
        "pages": len(pages),
        "sentences of 48 words and more": sum(
            len(each.split()) >= LONG for text in written for each in sentences(text)
        ),
        "median of lines": int(statistics.median(sizes)),
        "lines of megarl/, with C++ and JavaScript": sum(sizes) + sum(map(_lines, native)),
        "lines of tests/": sum(map(_lines, python_files("tests"))),
        "words of pages": sum(len(text.split()) for text in texts.values()),
    }


def main(argv: list[str]) -> int:
    """Prints the table; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--limits", action="store_true", help="compare with the limits")
    found, above = counts(), []
    for name, count in found.items():
        print(f"{name:58} {count:7} {LIMITS.get(name, ''):>7}")
        above += [name] if name in LIMITS and count > LIMITS[name] else []
    if parser.parse_args(argv).limits and above:
        print(f"house: above the limit: {', '.join(above)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
