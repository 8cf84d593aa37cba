"""Qwen3-Coder: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, each on a line.

A new line after `<parameter=key>`, and one before `</parameter>`, are no part of the value. A call may lack
`<tool_call>`, which these models tend to forget.
"""

from megarl.tool_formats.calls import WrittenCall, checked
from megarl.tool_formats.reader import Grammar
from megarl.tool_formats.sections import enclosed
from megarl.tool_formats.typed_arguments import TextCursor, Tools, argument, parameters_of

BEGIN, END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END, _PARAMETER, _PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
MARKS = (BEGIN, END)  # the others are never one token


def qwen_coder(tools: Tools) -> Grammar:
    """The grammar of `--tool-call-parser qwen3-coder`. `tools`: whose schemas say what is a string."""
    ends = {BEGIN: END, _FUNCTION: _FUNCTION_END}
    yield from enclosed(ends, lambda text: _call(text.removeprefix(BEGIN), tools))


def _call(written: str, tools: Tools) -> WrittenCall:
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
