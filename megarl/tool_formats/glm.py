"""GLM 4.5: `<tool_call>name` with `<arg_key>…</arg_key><arg_value>…</arg_value>` for each argument, `</tool_call>`."""

from megarl.tool_formats.calls import WrittenCall, checked
from megarl.tool_formats.reader import Grammar
from megarl.tool_formats.sections import enclosed
from megarl.tool_formats.typed_arguments import TextCursor, Tools, argument, parameters_of

BEGIN, END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
MARKS = (BEGIN, END, _KEY, _KEY_END, _VALUE, _VALUE_END)


def glm(tools: Tools) -> Grammar:
    """The grammar of `--tool-call-parser glm`. `tools`: whose schemas say what is a string."""
    yield from enclosed({BEGIN: END}, lambda text: _call(text.removeprefix(BEGIN), tools))


def _call(written: str, tools: Tools) -> WrittenCall:
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
