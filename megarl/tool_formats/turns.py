"""A turn that is known whole: its parts put together."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from megarl.tool_formats.calls import MAX_CALLS, WrittenCall
from megarl.tool_formats.reader import CONTENT, Calls, Part
from megarl.tool_formats.table import ToolFormat


class TurnParts(NamedTuple):
    """What a turn consists of; `errors`: why texts that look like calls are none, one for each."""

    reasoning: str
    content: str  # a line for each text between calls
    calls: list[WrittenCall]
    errors: list[str]


def joined(parts: Iterable[Part]) -> TurnParts:
    """The turn of all parts that a `TurnReader` has found."""
    reasoning: list[str] = []
    segments: list[list[str]] = [[]]
    found: list[WrittenCall | str] = []
    for part in parts:
        if isinstance(part, Calls):
            segments.append([])
            found += part.found
        else:
            (segments[-1] if part.kind == CONTENT else reasoning).append(part.text)
    content = "\n".join(filter(None, ("".join(segment).strip() for segment in segments)))
    calls = [call for call in found if isinstance(call, WrittenCall)]
    errors = [error for error in found if isinstance(error, str)]
    return TurnParts("".join(reasoning).strip(), content, calls, errors)


def call_ids(calls: Iterable[WrittenCall], form: ToolFormat, turn: int) -> list[str]:
    """An id for each call of a turn: the one that the policy wrote, if the format has such; all differ."""
    found: dict[str, None] = {}
    for index, call in enumerate(calls):
        own = [call.id] if form.accepts_id(call.id) else []
        made = (form.call_id(turn, number) for number in itertools.count(index, MAX_CALLS))  # the policy may have them
        found[next(each for each in itertools.chain(own, made) if each not in found)] = None
    return list(found)
