"""Checks documented flags without running a program, with the real parsers; what a flag of a tool is."""

import ast
import functools
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch.distributed.run

from megarl import arguments
from megarl.errors import UsageError
from megarl.flags import parser, role_flags
from tests.helpers.programs import ROOT

PROGRAMS = {module: program for program, module in parser.MODULES.items()}
ELLIPSIS = re.compile(r".*(…|\.\.\.).*|\$\{\w+\[@\]\}")  # words that stand for others
PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*|\$\{?\w+\}?.*|<.+>")  # a value that the reader replaces
UNREAD = ("--hf-model", "--lora-adapter", "--reward-hf-model")  # folders that the parser would read at once


class WrongCommand(AssertionError):
    """A documented command that would not work."""


def require(holds: object, problem: str):
    """WrongCommand with the problem unless it holds."""
    if not holds:
        raise WrongCommand(problem)


@functools.cache
def megatron() -> tuple[dict[str, str], frozenset[str]]:
    """(option -> attribute of Megatron's parser, the options that megarl accepts)."""
    from megarl.mcore.config import megatron_flags, supported_flags

    found = megatron_flags.destinations()
    used = supported_flags.used() | {"global_batch_size"}
    return found, frozenset(option for option, dest in found.items() if dest in used)


@functools.cache
def megarl_flags(program: str) -> dict[str, parser.Flag]:
    """megarl's flags of a program."""
    return parser.own_flags(program)


def without_ellipsis(words: Iterable[str]) -> list[str]:
    """The words without those that stand for others; of `--flag …` the flag stays, and has the value 1."""
    kept, after_flag = [], False
    for word in words:
        if not ELLIPSIS.fullmatch(word):
            kept.append(word)
        elif after_flag and word == kept[-1] + "=…":
            kept.append("1")
        after_flag = word.startswith("--")
    return kept


def with_values(words: list[str], flags: dict[str, parser.Flag], numbers: Iterable[str] = ()) -> list[str]:
    """The words with 1 for placeholders of numbers. `numbers`: further flags whose value is one."""
    found = []
    for before, word in zip(["", *words], words, strict=False):
        flag = flags.get(before.removeprefix("--"))
        is_number = before in (*numbers, *megatron()[0]) or flag is not None and flag.kind is not str
        found.append("1" if is_number and PLACEHOLDER.fullmatch(word) else word)
    return found


def check_flags(program: str, words: Iterable[str], is_inline: bool = False, ranks: int = 1):
    """UsageError or WrongCommand for flags that a program refuses. `program`: 'rl', 'sft' and so on.

    A command without gaps is parsed as the program would; of others every flag and value is checked by itself.
    """
    words = list(words)
    tokens = without_ellipsis(words)
    flags = megarl_flags(program)
    configs, taking = [], False
    for word in tokens:
        taking = word == "--config" or taking and not word.startswith("--")
        configs += [word] if taking and word != "--config" else []
    for config in configs:
        is_ours = config.startswith("configs/")
        require(not is_ours or (ROOT / config).is_file(), f"--config {config}: no such file")
    is_whole = len(tokens) == len(words) and not any(PLACEHOLDER.fullmatch(word) for word in words)
    if is_whole and configs and all(map(Path.is_file, (ROOT / c for c in configs))) and not set(UNREAD) & set(words):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            arguments.parse(words, ranks, program)
        return
    tokens = [word for word in tokens if word not in ("--config", *configs)]
    if is_inline:
        tokens = [word for word in tokens if not re.fullmatch("[A-Z]+", word) or tokens[0] != word]
    chosen, rest = parser.build_parser(program, flags).parse_known_args(with_values(tokens, flags))
    values = {name: value for name, value in vars(chosen).items() if name in flags}
    parser.check_values(values, flags)
    options, accepted = megatron()
    rest = [word for word in rest if not re.fullmatch("[A-Z]+", word)]
    for role, of_role in role_flags.split(rest, role_flags.ROLES_OF[program], options, unknown).items():
        _check_megatron(role, of_role, accepted)


def unknown(option: str, name: str) -> UsageError:
    """The error of a flag that does not exist."""
    return UsageError(f"{option}: unknown flag")


def _check_megatron(role: str, tokens: list[str], accepted: frozenset[str]):
    from megarl.mcore.config import megatron_flags

    for token in tokens:
        option = token.split("=", 1)[0]
        require(not option.startswith("--") or option in accepted, f"{option}: megarl does not use this Megatron flag")
    megatron_flags.parse_tokens(role, tokens)


def _words(tree: ast.AST) -> set[str]:
    """The strings of a program that may be names of flags, or their beginnings."""
    texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return {text for text in texts if re.fullmatch("[a-z][a-z0-9-]*", text)}


@functools.cache
def source_flags(path: Path) -> frozenset[str]:
    """The flags in the source of a tool, of the tools that it imports, and of a module whose `main` it calls."""
    tree, found = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch("--[a-z][a-z0-9-]*", node.value)
        ):
            found.add(node.value)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument" and node.args:
            first = node.args[0]
            if isinstance(first, ast.JoinedStr):  # f"--{prefix}prompts": any word of the file may be the prefix
                end = first.values[-1].value if isinstance(first.values[-1], ast.Constant) else None
                found |= {f"--{name}{end or ''}" for name in ("", *_words(tree))}
        takes_over = isinstance(node, ast.ImportFrom) and any(alias.name == "main" for alias in node.names)
        if isinstance(node, ast.ImportFrom) and (takes_over or (node.module or "").startswith("tools")):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for module in (ROOT / (name.replace(".", "/") + ".py") for name in names):
                found |= source_flags(module) if module.is_file() and module != path else set()
    return frozenset(found)


def check_tool(path: Path, words: list[str], is_inline: bool):
    text = path.read_text()
    takes_ours = "parse_known_args" in text or "arguments.parse" in text or "launch(" in text
    others = []
    for word in without_ellipsis(words):
        flag = word.split("=", 1)[0]
        if not flag.startswith("--") or flag in source_flags(path):
            continue
        require(takes_ours, f"{path.name} has no flag {flag}")
        others.append(flag)
    known = {f"--{name}" for name in megarl_flags("rl")} | megatron()[1]
    for flag in others:
        require(flag in known, f"{path.name}: {flag}: no flag of train_rl or Megatron")


@functools.cache
def all_flags() -> frozenset[str]:
    """Every flag that documentation may name: of programs, roles, Megatron, tools, scripts, torchrun."""
    names = {f"--{name}" for program in PROGRAMS.values() for name in megarl_flags(program)} | set(megatron()[0])
    names |= {f"--{role}-{name[2:]}" for role in role_flags.ROLES for name in names}
    names |= {"--config", "--check", "--help"}
    for path in (*ROOT.glob("tools/**/*.py"), *ROOT.glob("megarl/*.py"), *ROOT.glob("megarl/observe/*.py")):
        names |= source_flags(path)
    scripts = [*ROOT.glob("launch/**/*.sh"), *ROOT.glob("tests/*.sh"), *ROOT.glob("tools/*.sh")]
    names |= {flag for path in scripts for flag in re.findall(r"--[a-z][a-z-]+", path.read_text())}
    names |= {o for action in torch.distributed.run.get_args_parser()._actions for o in action.option_strings}
    return frozenset(names)
