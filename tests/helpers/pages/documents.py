"""The Markdown pages of the project: their code, links, headings, and the shell commands in them."""

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.helpers.programs import ROOT

GENERATED = ("flags.md", "metrics.md")
FENCE = re.compile(r"^( *)(```+)([\w-]*)[^\n]*\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)")
STARTS = re.compile(r"(\w+=\S+ )*(bash|sbatch|srun|torchrun|pip|curl|lm_eval|\S*python3?) \S")
ERROR = "megarl: error: "
KEYWORDS = ("do", "then", "else", "!", "time", "exec")  # that may come before a command
CONTROL = ("for", "while", "until", "if", "elif", "done", "fi", "do", "then", "else", "case", "esac", "{", "}")
HOLE = "…"  # a value in a text of the code
HERE = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")


class Block(NamedTuple):
    """A fenced block of code: the line of its fence, its language, its text."""

    line: int
    language: str
    text: str


class Command(NamedTuple):
    """A simple command: page and line, the words, the variables before it, and whether it is inline code in prose.

    `error`: the error that the page shows as its output.
    """

    where: str
    words: tuple[str, ...]
    variables: dict[str, str]
    is_inline: bool
    error: str = ""

    def __str__(self):
        return f"{self.where}: {shlex.join(self.words)}"


def pages() -> list[Path]:
    """README.md, CONTRIBUTING.md and every page of docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    """A page's path in the checkout, or its name outside."""
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


@functools.cache
def text_of(page: Path) -> str:
    """A page's text."""
    return page.read_text(encoding="utf-8")


def blocks(text: str) -> list[Block]:
    """The fenced blocks, with their indentation removed."""
    found = []
    for match in FENCE.finditer(text):
        indent = len(match[1])
        lines = "\n".join(line[indent:] for line in match[4].split("\n"))
        found.append(Block(text.count("\n", 0, match.start()) + 1, match[3], lines))
    return found


def prose(text: str) -> str:
    """The text with fenced blocks blanked, at the same lines."""
    return FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)


def inline_code(text: str) -> list[tuple[int, str]]:
    """(line, code) of the code spans in prose."""
    text = prose(text)
    spans = re.finditer(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", text, re.DOTALL)
    return [(text.count("\n", 0, span.start()) + 1, " ".join(span[2].split())) for span in spans]


def links(text: str) -> list[tuple[int, str]]:
    """(line, target) of the links and pictures in prose."""
    text = re.sub(r"`[^`\n]*`", lambda span: " " * len(span[0]), prose(text))
    return [(text.count("\n", 0, match.start()) + 1, match[1]) for match in LINK.finditer(text)]


def anchors(text: str) -> set[str]:
    """The anchors of the headings, as GitHub and the site make them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose(text), re.MULTILINE):
        heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    return {f"{slug}-{number}" if number else slug for slug, last in found.items() for number in range(last + 1)}


def literals(path: Path) -> Iterator[str]:
    """The string constants and f-strings (each value a `HOLE`) of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(v.value if isinstance(v, ast.Constant) else HOLE for v in node.values)


@functools.cache
def code_texts() -> tuple[str, ...]:
    """The texts of the programs: literals, with a `HOLE` for each value, and the lines of the scripts."""
    found = [text for path in sorted((ROOT / "megarl").rglob("*.py")) for text in literals(path)]
    for path in sorted((ROOT / "launch").glob("*.sh")):
        found += [re.sub(r"\$\{[^}]*\}|\$\w+", HOLE, line) for line in path.read_text().split("\n")]
    return tuple(found)


# -- shell commands ----------------------------------------------------------------------------------------------


def _lines(text: str) -> list[str]:
    """The logical lines of a script: continued ones joined, here-documents left out, arrays on one line."""
    found, end = [], None
    for line in re.sub(r"\\\n\s*", " ", text).split("\n"):
        if end is not None:
            end = None if line.strip() == end else end
            continue
        if found and re.match(r"\w+\+?=\(", found[-1]) and not found[-1].rstrip().endswith(")"):
            found[-1] += " " + re.sub(r"(^|\s)#.*", "", line)
        else:
            found.append(line.strip())
        end = match[1] if (match := HERE.search(line)) else None
    return found


def _terminal(block: Block, where: str) -> list[Command]:
    """The commands typed after `$ ` in a block that shows a terminal."""
    lines, found = block.text.split("\n"), []
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    for first in starts:
        end = first
        while lines[end].endswith("\\"):
            end += 1
        text = "\n".join(lines[first : end + 1]).removeprefix("$ ")
        commands = parse_shell(text, where, block.line + 1 + first)
        output = lines[end + 1] if end + 1 < len(lines) else ""
        if output.startswith(ERROR):
            commands[-1] = commands[-1]._replace(error=output.removeprefix(ERROR))
        found += commands
    return found


def _simple(line: str) -> list[list[str]]:
    """The words of each simple command of a line."""
    line = re.sub(r"\d?>&\d|&>\S*", "", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split, lexer.commenters = True, "#"
    found: list[list[str]] = [[]]
    for token in lexer:
        if token and set(token) <= set(";&|"):
            found.append([])
        else:
            found[-1].append(token)
    return found


def _command(words: list[str]) -> tuple[list[str], dict[str, str]] | None:
    """(words, variables) of a simple command; None for shell syntax and mere assignments."""
    variables: dict[str, str] = {}
    while words and (words[0] in KEYWORDS or re.match(r"\w+=", words[0])):
        name, equals, value = words[0].partition("=")
        variables |= {name: value} if equals else {}
        words = words[1:]
    kept, skip = [], False
    for word in words:
        if skip or re.match(r"\d?[<>]", word):
            skip = not skip and bool(re.fullmatch(r"\d?[<>]+&?", word))
        else:
            kept.append(word)
    return None if not kept or kept[0] in CONTROL else (kept, variables)


def parse_shell(text: str, where: str, line: int = 1, is_inline: bool = False) -> list[Command]:
    """The commands of a shell text. An array's items are a command whose first word is the array's name with `=`."""
    found = []
    for number, each in enumerate(_lines(text), line):
        place = where if is_inline else f"{where}:{number}"
        for inner in re.findall(r"\$\(([^()]+)\)", each):
            found += parse_shell(inner, place, is_inline=True)
        each = re.sub(r"\$\([^()]+\)", "VALUE", each)
        if match := re.match(r"(\w+)\+?=\((.*)\)$", each):
            found.append(Command(place, (f"{match[1]}=", *shlex.split(match[2], comments=True)), {}, is_inline))
            continue
        commands = filter(None, map(_command, _simple(each)))
        found += [Command(place, tuple(words), variables, is_inline) for words, variables in commands]
    return found


def commands_in(text: str, where: str) -> list[Command]:
    """The commands of a page: bash blocks, lines typed at a prompt, and inline code that starts a program."""
    found = []
    for block in blocks(text):
        if block.language in ("bash", "sh", "shell"):
            found += parse_shell(block.text, where, block.line + 1)
        elif block.language == "console":
            found += _terminal(block, where)
    for line, span in inline_code(text):
        if STARTS.match(span):
            found += parse_shell(span, f"{where}:{line}", is_inline=True)
    return found
