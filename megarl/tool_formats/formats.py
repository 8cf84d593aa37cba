"""Formats with marks around each call: Hermes, Qwen3-Coder, GLM; DeepSeek, Kimi, with a section around the calls;
gpt-oss, with marks around each message; and those whose calls are JSON without an end: plain JSON, Llama, Mistral.

Each is a grammar of `--tool-call-parser`, and its marks.
"""

import re
from collections.abc import Callable, Generator, Mapping
from typing import Any

from megarl.tool_formats.reader import CONTENT, REASONING, Begins, Calls, Grammar, Said, ThoughtMarks, Until
from megarl.tool_formats.written_calls import (
    MAX_CALLS,
    TextCursor,
    Tools,
    WrittenCall,
    argument,
    attempt,
    call_of,
    checked,
    parameters_of,
    read_arguments,
    read_json,
    read_json_values,
)

BEGIN, END = CALL_MARKS = "<tool_call>", "</tool_call>"  # of Hermes and Qwen3-Coder, whose others are never one token
_FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
GLM_MARKS = (BEGIN, END, _KEY, _KEY_END, _VALUE, _VALUE_END)
# Of a section, its end, a call in it, its end.
_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK_MARKS = (*_DEEPSEEK, _DEEPSEEK_SEPARATOR)
_FENCE = "```"
_KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
KIMI_MARKS = (*_KIMI, _KIMI_SEPARATOR)
_NUMBER = re.compile(r":[0-9]+\Z")


def enclosed(ends: Mapping[str, str], read: Callable[[str], WrittenCall]) -> Grammar:
    """Reads calls without a section, each between a mark and its end in `ends`; the last one needs no end."""
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

    New lines around a value are no part of it. A call may lack `<tool_call>`, which these models tend to forget.
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
    """GLM 4.5: `<tool_call>name`, `<arg_key>…</arg_key><arg_value>…</arg_value>` for each argument, `</tool_call>`."""
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


def sectioned(marks: tuple[str, str, str, str], read: Callable[[str], WrittenCall]) -> Grammar:
    """Reads calls in a section, whose marks may lack. A call without an end ends with the section or the next call."""
    section, section_end, call, call_end = marks
    _, mark = yield Until((section, section_end, call), CONTENT)
    while mark is not None:
        if mark != call:
            _, mark = yield Until((section, section_end, call), CONTENT)
            continue
        written, mark = yield Until((call_end, section_end, call))
        yield Calls(call + written + (call_end if mark == call_end else ""), [attempt(read, written)])


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

    Results of tools refer to the id before the arguments.
    """
    yield from sectioned(_KIMI, _kimi_call)


def _kimi_call(written: str) -> WrittenCall:
    written_id, arguments = name_and_arguments(written, _KIMI_SEPARATOR)
    return read_arguments(_NUMBER.sub("", written_id.removeprefix("functions.")), arguments, written_id)


# -- messages ----------------------------------------------------------------------------------------------------------

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_THOUGHTS = ThoughtMarks(
    "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant<|channel|>final<|message|>"
)
HARMONY_MARKS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", *_ENDS)
_RECIPIENT = re.compile(r"(?:\s|<\|start\|>)to=([^\s<]+)")
_ANALYSIS = re.compile(re.escape(_CHANNEL) + r"\s*analysis(?![^\s<])")


def harmony(tools) -> Grammar:
    """Harmony, of gpt-oss: a turn is several messages, each with a channel and perhaps a recipient.

        <|channel|>analysis<|message|>…<|end|>
        <|start|>assistant<|channel|>commentary to=functions.f json<|message|>{…}<|call|>

    Analysis is thoughts, a message to a function is a call, all else is content. The prompt has opened the first one.
    """
    said: set[str] = set()
    mark = _START if (yield Begins(("to=",))) else None
    while True:
        if mark != _START:
            _, mark = yield Until((_START, _CHANNEL, _MESSAGE), CONTENT)
            if mark is None:
                return
        header, begin = "", mark
        if mark != _MESSAGE:
            header, begin = yield Until((_MESSAGE, *_ENDS))
        # A message that has no body is nothing.
        mark = (yield from _message(mark + header, said)) if begin == _MESSAGE else begin
        if mark is None:
            return


def _message(header: str, said: set[str]) -> Generator[Any, Any, str | None]:
    """Reads a message's body. Returns the mark that ends it; None at the end of the text. `said`: kinds before it."""
    recipient = _RECIPIENT.search(header)
    if recipient is not None:
        written, mark = yield Until((_START, *_ENDS))
        name = recipient[1].removeprefix("functions.")
        yield Calls(header + _MESSAGE + written, [attempt(read_arguments, name, written)])
        return mark
    kind = REASONING if _ANALYSIS.search(header) else CONTENT
    if kind in said:
        yield Said(kind, "\n")
    said.add(kind)
    _, mark = yield Until((_START, *_ENDS), kind)
    return mark


# -- calls that are JSON without an end of their own: plain JSON, Llama, Mistral ---------------------------------------


_JSON_FENCE = re.compile(r"\A```(?:json)?[ \t]*\n(.*)\n[ \t]*```\Z", re.DOTALL)
_LIKE_PLAIN_CALL = re.compile(r'\A\s*(?:\[\s*)?\{\s*"(?:name|arguments)"\s*:')
LLAMA_TAG = "<|python_tag|>"
_LLAMA_FIELDS = ("parameters", "arguments")
_LIKE_LLAMA_CALL = re.compile(r'\A\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|parameters)"\s*:')
MISTRAL_BEGIN, _MISTRAL_ID, _MISTRAL_ARGUMENTS = MISTRAL_MARKS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MISTRAL_THOUGHTS = "[THINK]", "[/THINK]"


def plain_json(tools) -> Grammar:
    """The whole turn is a JSON object with name and arguments, or a list of them, perhaps in a code fence.

    Other JSON is content.
    """
    if (yield Begins(("{", "[", "```"))) is None:
        yield Until((), CONTENT)
        return
    written, _ = yield Until(())
    found = _plain_calls(written.strip())
    yield Calls(written, found) if found else Said(CONTENT, written)


def _plain_calls(whole: str) -> list[WrittenCall | str]:
    fenced = _JSON_FENCE.match(whole)
    inner = fenced[1].strip() if fenced else whole
    if inner[:1] not in ("{", "["):
        return []
    try:
        value = read_json(inner)
    except ValueError as error:
        return [] if _LIKE_PLAIN_CALL.match(inner) is None else [str(error)]
    values = value if isinstance(value, list) else [value]
    if not any(isinstance(each, dict) and "arguments" in each for each in values):
        return []
    return [attempt(call_of, each) for each in values[: MAX_CALLS + 1]]


def llama(tools) -> Grammar:
    """Llama 3: the whole turn is `{"name": …, "parameters": {…}}`, or several with `;` between them, perhaps after
    `<|python_tag|>`. JSON without that mark which is no call is content.
    """
    begins = yield Begins(("{", LLAMA_TAG))
    if begins == "{":
        written, mark = yield Until((LLAMA_TAG,))
        found = _llama_calls(written, is_marked=False)
        yield Calls(written, found) if found else Said(CONTENT, written)
    else:
        _, mark = yield Until((LLAMA_TAG,), CONTENT)
    while mark is not None:
        written, mark = yield Until((LLAMA_TAG,))
        yield Calls(LLAMA_TAG + written, _llama_calls(written, is_marked=True) or ["a call must be a JSON object"])


def _llama_calls(written: str, is_marked: bool) -> list[WrittenCall | str]:
    values, problem = read_json_values(written, ";", MAX_CALLS + 1)
    named = [value for value in values if isinstance(value, dict) and "name" in value]
    is_call = any(field in value for value in named for field in _LLAMA_FIELDS)
    if not is_marked and not is_call and not (problem and _LIKE_LLAMA_CALL.match(written)):
        return []
    return [attempt(call_of, value, _LLAMA_FIELDS) for value in values] + ([problem] if problem else [])


def mistral(tools) -> Grammar:
    """Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}, "id": …}, …]`, or since version 11 of its tokenizer
    `[TOOL_CALLS]name[ARGS]{…}` for each call, in version 11 with `[CALL_ID]id` after the name.
    """
    _, mark = yield Until((MISTRAL_BEGIN,), CONTENT)
    while mark is not None:
        written, mark = yield Until((MISTRAL_BEGIN,))
        yield Calls(MISTRAL_BEGIN + written, _mistral_calls(written))


def _mistral_calls(written: str) -> list[WrittenCall | str]:
    head, mark, arguments = written.partition(_MISTRAL_ARGUMENTS)
    if mark:
        name, _, written_id = head.partition(_MISTRAL_ID)
        return [attempt(read_arguments, name.strip(), arguments, written_id.strip())]
    try:
        value = read_json(written)
    except ValueError as error:
        return [str(error)]
    values = value if isinstance(value, list) and value else [value]
    return [attempt(call_of, each) for each in values[: MAX_CALLS + 1]]
