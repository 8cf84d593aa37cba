"""Combinations of flags: parsed, or refused by the rule that is tried."""

import ast
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest

from megarl.arguments import RunConfig, parse
from megarl.flags import settings
from megarl.flags.settings import TOPICS
from tests.helpers.models.tiny_models import SHAPES
from tests.helpers.texts.refusals import refusal

MODEL = SHAPES["llama"].split()


def parsed(flags: str | list[str], program: str = "rl", size: int = 4) -> RunConfig:
    """The configuration of a program of `size` ranks."""
    return parse([*MODEL, *(flags.split() if isinstance(flags, str) else flags)], size, program)


def refused(flags: str | list[str], program: str = "rl", size: int = 4) -> str:
    """The one line that refuses these flags."""
    return refusal(parsed, flags, program, size)


def check_rules(topics: list[ModuleType], cases: dict[str, tuple[str, ...]], others: int = 0):
    """Every rule of these topics, and `others` of no topic, is the one that stops a case: those before it do not.

    `cases`: name -> flags, how the line starts that refuses them, perhaps the program.
    """
    stopped, rules = set(), settings.rules

    def recorded(run):
        place = next(filter(None, (_stopped(topic.rules(run)) for topic in TOPICS)), None)
        stopped.add(place or next(rules(run)).flag)  # a flag that needs another one
        return rules(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "rules", recorded)
        for name, (flags, start, *program) in cases.items():
            line = refused(flags, *program)
            assert line.startswith(start), (name, line)
    nodes = (node for topic in topics for node in ast.walk(ast.parse(Path(str(topic.__file__)).read_text())))
    assert len(stopped) == sum(isinstance(node, ast.Yield) for node in nodes) + others == len(cases)


def _stopped(rules: Generator) -> tuple[str, int] | None:
    """The place of the first rule that is broken."""
    if next(rules, None) is None:
        return None
    inner = rules  # `rules` itself must live on, or it is closed
    while inner.gi_yieldfrom is not None:
        inner = inner.gi_yieldfrom
    return inner.gi_code.co_filename, inner.gi_frame.f_lineno


def from_configs(tmp_path, *texts: str, argv=(), program: str = "rl"):
    """A program parsed from files with these texts, in this order, and from flags after them."""
    paths = [tmp_path / f"{number}.yaml" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return parse([*MODEL, "--config", *map(str, paths), *argv], 4, program)
