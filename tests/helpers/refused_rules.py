"""Rows of flags that a table of rules refuses: the line of each row, and the rules that stop none of them."""

import contextlib
from collections.abc import Collection
from typing import NamedTuple

import pytest

from megarl.arguments import parse
from megarl.errors import UsageError

Rows = dict[str, tuple[str, int, str]]  # flags besides the model's, ranks of every role, what the line must say


class Refused(NamedTuple):
    """What `refused` finds."""

    lines: dict[str, str]  # of each row; "": it was accepted
    unbroken: list[str]  # rules that are covered by those before them in every row


def refused(module, model: str, rows: Rows, on_gpus: Collection[str] = (), function: str = "rules") -> Refused:
    """Parses each row once. `function`: of the module, gives rules; `on_gpus`: rows of a pretended world of GPUs."""
    from megarl.mcore.parallel.process_groups import fake_world

    lines, stopped, total, names, rules = dict.fromkeys(rows, ""), set(), set(), [], getattr(module, function)

    def recorded(*args):
        found = rules(*args)
        total.add(len(found))
        stopped.update(next(([i] for i, rule in enumerate(found) if rule.is_broken), []))
        names[:] = [rule.flag for rule in found]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, function, recorded)
        for name, (text, ranks, _) in rows.items():
            with fake_world(ranks) if name in on_gpus else contextlib.nullcontext():
                try:
                    parse(f"{model} {text}".split(), ranks, "sft")
                except UsageError as error:
                    lines[name] = str(error)
        parse(model.split(), 1, "sft")
    assert total == {len(names)}  # always as many, in the same order
    return Refused(lines, [f"{i}: {name}" for i, name in enumerate(names) if i not in stopped])
