"""Reads a turn's text: reasoning, content and tool calls. The text is hostile: nothing in it raises an exception.

The formats are those of `megarl/tool_formats`, which the server reads, too.
"""

from collections.abc import Sequence
from typing import Any

from megarl.environments.protocol import ToolCall, Turn
from megarl.plain_values import whole_unicode
from megarl.tool_formats import FORMATS
from megarl.tool_formats.reader import CONTENT, REASONING, Said, TurnParts, joined
from megarl.tool_formats.tool_format import TextParser, ToolFormat
from megarl.tool_formats.written_calls import WrittenCall, attempt, checked

HERMES = FORMATS["hermes"]


def parse_turn(
    text: str, number: int, form: ToolFormat = HERMES, tools: Sequence[dict[str, Any]] = (), marked: str | None = None
) -> Turn:
    """What the policy wrote in turn `number`.

    Its thoughts end with a mark such as `</think>`, and may begin with one, unless the template wrote that; a turn that
    begins so and does not end its thoughts is nothing else, so calls in thoughts are not made. Calls that
    `megarl.tool_formats.written_calls` does not allow are errors. `tools`: whose schemas say what an argument is where
    the format does not; `marked`: the text with the special tokens that are marks of the format; None: the same text.
    """
    text = whole_unicode(text)
    read = text if marked is None else whole_unicode(marked)
    reader = form.reader(tools)
    parts = [*reader.feed(read), *reader.finish()]
    if form.parser is None:
        found = joined(parts)
    else:
        said = [part for part in parts if isinstance(part, Said)]
        thoughts = "".join(part.text for part in said if part.kind == REASONING)
        found = _read_by_user(
            form.parser, thoughts.strip(), "".join(part.text for part in said if part.kind == CONTENT)
        )
    ids = form.call_ids(found.calls, number)
    calls = tuple(ToolCall(each, call.name, call.arguments) for each, call in zip(ids, found.calls, strict=True))
    return Turn(number, text, found.content, found.reasoning, calls, tuple(found.errors))


def _read_by_user(parser: TextParser, reasoning: str, text: str) -> TurnParts:
    try:
        content, calls, errors = parser(text)
        found = [attempt(checked, WrittenCall(name, arguments)) for name, arguments in calls]
        good = [call for call in found if isinstance(call, WrittenCall)]
        problems = [*map(str, errors), *(problem for problem in found if isinstance(problem, str))]
        return TurnParts(reasoning, str(content), good, problems)
    except Exception as error:  # of a plug-in that did not expect this text
        return TurnParts(reasoning, text, [], [f"{type(error).__name__}: {error}"[:200]])
