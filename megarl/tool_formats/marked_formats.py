"""Formats with marks around each call: Hermes, Qwen3-Coder, GLM; and DeepSeek, Kimi, with a section around the calls.

Each is a grammar of `--tool-call-parser`, and its marks.
"""

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from megarl.tool_formats.calls import WrittenCall, attempt, call_of, checked, read_arguments, read_json
from megarl.tool_formats.reader import CONTENT, Calls, Grammar, Until
from megarl.tool_formats.typed_arguments import TextCursor, Tools, argument, parameters_of


class SectionMarks(NamedTuple):
    """Marks of the section, and of each call in it."""

    section: str
    section_end: str
    call: str
    call_end: str


BEGIN, END = CALL_MARKS = "<tool_call>", "</tool_call>"  # of Hermes and Qwen3-Coder, whose others are never one token
_FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
GLM_MARKS = (BEGIN, END, _KEY, _KEY_END, _VALUE, _VALUE_END)
_DEEPSEEK = SectionMarks(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
)
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK_MARKS = (*_DEEPSEEK, _DEEPSEEK_SEPARATOR)
_FENCE = "```"
_KIMI = SectionMarks(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"
)
_KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
KIMI_MARKS = (*_KIMI, _KIMI_SEPARATOR)
_NUMBER = re.compile(r":[0-9]+\Z")


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


def hermes(tools) -> Grammar:
    """Hermes, Qwen 2.5, Qwen 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`; the last one needs no end."""
    yield from enclosed({BEGIN: END}, lambda text: call_of(read_json(text.removeprefix(BEGIN))))


def qwen_coder(tools: Tools) -> Grammar:
    """Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, each on a line.

    A new line after `<parameter=key>`, and one before `</parameter>`, are no part of the value. A call may lack
    `<tool_call>`, which these models tend to forget. `tools`: whose schemas say what is a string.
    """
    ends = {BEGIN: END, _FUNCTION: _FUNCTION_END}
    yield from enclosed(ends, lambda text: _qwen_call(text.removeprefix(BEGIN), tools))


def _qwen_call(written: str, tools: Tools) -> WrittenCall:
    cursor = TextCursor(written)
    before, name = cursor.until(_FUNCTION), cursor.until(">")
    if before is None or before.strip() or name is None:
        raise ValueError(f"a call must be {_FUNCTION}NAME>…{_FUNCTION_END}")
    name, arguments = name.strip(), {}
    parameters = parameters_of(tools, name)
    while (before := cursor.until(_PARAMETER)) is not None:
        key, value = cursor.until(">"), cursor.until(_PARAMETER_END)
        if before.strip() or key is None or value is None:
            raise ValueError(f"an argument of {name[:80]!r} must be {_PARAMETER}KEY>…{_PARAMETER_END}")
        text = value.removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = argument(text, parameters.get(key.strip()))
    if cursor.rest().strip().removesuffix(_FUNCTION_END):
        raise ValueError(f"the arguments of {name[:80]!r} are followed by other text")
    return checked(WrittenCall(name, arguments))


def glm(tools: Tools) -> Grammar:
    """GLM 4.5: `<tool_call>name`, `<arg_key>…</arg_key><arg_value>…</arg_value>` for each argument, `</tool_call>`.

    `tools`: whose schemas say what is a string.
    """
    yield from enclosed({BEGIN: END}, lambda text: _glm_call(text.removeprefix(BEGIN), tools))


def _glm_call(written: str, tools: Tools) -> WrittenCall:
    cursor = TextCursor(written)
    name = cursor.until(_KEY)
    if name is None:
        return checked(WrittenCall(written.strip(), {}))
    name, arguments = name.strip(), {}
    parameters = parameters_of(tools, name)
    before: str | None = ""
    while before is not None:
        key, between, value = cursor.until(_KEY_END), cursor.until(_VALUE), cursor.until(_VALUE_END)
        if key is None or between is None or value is None or (before + between).strip():
            raise ValueError(f"an argument of {name[:80]!r} must be {_KEY}…{_KEY_END}{_VALUE}…{_VALUE_END}")
        arguments[key.strip()] = argument(value, parameters.get(key.strip()))
        before = cursor.until(_KEY)
    if cursor.rest().strip():
        raise ValueError(f"the arguments of {name[:80]!r} are followed by other text")
    return checked(WrittenCall(name, arguments))


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


def name_and_arguments(written: str, separator: str) -> tuple[str, str]:
    """What stands before and after the separator of a call. ValueError for a call without it."""
    name, mark, arguments = written.partition(separator)
    if not mark:
        raise ValueError(f"a call must have a name and {separator} before its arguments")
    return name.strip(), arguments


def deepseek(tools) -> Grammar:
    """DeepSeek: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name` with the arguments in a fence of JSON (V3, R1), or
    `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}` (V3.1), within a section of calls.
    """
    yield from sectioned(_DEEPSEEK, _deepseek_call)


def _deepseek_call(written: str) -> WrittenCall:
    head, body = name_and_arguments(written, _DEEPSEEK_SEPARATOR)
    if head != "function" or body.lstrip().startswith("{"):
        return read_arguments(head, body)
    name, _, arguments = body.strip().partition("\n")
    arguments = arguments.strip()
    if arguments.startswith(_FENCE):
        arguments = arguments.removesuffix(_FENCE).partition("\n")[2]
    return read_arguments(name.strip(), arguments)


def kimi(tools) -> Grammar:
    """Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`, in a section.

    What stands before the arguments is the call's id, which the results of tools refer to.
    """
    yield from sectioned(_KIMI, _kimi_call)


def _kimi_call(written: str) -> WrittenCall:
    written_id, arguments = name_and_arguments(written, _KIMI_SEPARATOR)
    return read_arguments(_NUMBER.sub("", written_id.removeprefix("functions.")), arguments, written_id)
