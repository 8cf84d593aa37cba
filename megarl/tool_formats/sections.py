"""Calls between marks of their own, perhaps within a section that has marks, too (DeepSeek, Kimi)."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from megarl.tool_formats.calls import WrittenCall, attempt
from megarl.tool_formats.reader import CONTENT, Calls, Grammar, Until


def enclosed(ends: Mapping[str, str], read: Callable[[str], WrittenCall]) -> Grammar:
    """Reads calls without a section; the last one needs no end.

    Args:
        ends: the mark that ends a call, by the one that begins it.
        read: the call of the text from its first mark on.
    """
    while True:
        _, mark = yield Until(tuple(ends), CONTENT)
        if mark is None:
            return
        written, end = yield Until((ends[mark],))
        yield Calls(f"{mark}{written}{end or ''}", [attempt(read, mark + written)])
        if end is None:
            return


class SectionMarks(NamedTuple):
    """Marks of the section, and of each call in it."""

    section: str
    section_end: str
    call: str
    call_end: str


def name_and_arguments(written: str, separator: str) -> tuple[str, str]:
    """What stands before and after the separator of a call. ValueError for a call without it."""
    name, mark, arguments = written.partition(separator)
    if not mark:
        raise ValueError(f"a call must have a name and {separator} before its arguments")
    return name.strip(), arguments


def sectioned(marks: SectionMarks, read: Callable[[str], WrittenCall]) -> Grammar:
    """Reads calls, whether or not the policy has begun or ended their section. A call that has no end of its own ends
    with the section, or with the next call.

    Args:
        read: the call of the text between its marks.
    """
    _, mark = yield Until((marks.section, marks.section_end, marks.call), CONTENT)
    while mark is not None:
        if mark != marks.call:
            _, mark = yield Until((marks.section, marks.section_end, marks.call), CONTENT)
            continue
        written, mark = yield Until((marks.call_end, marks.section_end, marks.call))
        end = marks.call_end if mark == marks.call_end else ""
        yield Calls(marks.call + written + end, [attempt(read, written)])
