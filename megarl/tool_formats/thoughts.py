"""Thoughts between two marks at the start of a turn, before what a format reads."""

from typing import NamedTuple

from megarl.data.message_forms import CLOSE, OPEN
from megarl.tool_formats.reader import REASONING, Back, Begins, Grammar, Said, Until

THINK = OPEN, CLOSE


class ThoughtMarks(NamedTuple):
    """How a family of models marks its thoughts."""

    begin: str
    end: str
    after: str = "\n\n"  # what it writes between the end and the answer


def thoughts(marks: tuple[str, str], opened: bool | None) -> Grammar:
    """Reads the thoughts of a turn, if it has any.

    Thoughts that the turn begins and does not end are all of it, so calls in them are not made.

    Args:
        marks: that begin and end thoughts.
        opened: whether the prompt has begun them; None: unknown, so all text before their end is thoughts.
    """
    begin, end = marks
    begins = yield Begins((begin,))
    if opened is None and not begins:
        text, mark = yield Until((end,))
        yield Said(REASONING, text) if mark else Back(text)
    elif opened or begins:
        if begins:
            yield Until((begin,))  # white space
        yield Until((end,), REASONING)
