"""DeepSeek: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name` with the arguments in a fence of JSON (V3, R1), or
`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{…}` (V3.1), within a section of calls.
"""

from megarl.tool_formats.calls import WrittenCall, read_arguments
from megarl.tool_formats.reader import Grammar
from megarl.tool_formats.sections import SectionMarks, name_and_arguments, sectioned

_SECTION = SectionMarks(
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
)
_SEPARATOR = "<｜tool▁sep｜>"
MARKS = (*_SECTION, _SEPARATOR)
_FENCE = "```"


def deepseek(tools) -> Grammar:
    """The grammar of `--tool-call-parser deepseek`."""
    yield from sectioned(_SECTION, _call)


def _call(written: str) -> WrittenCall:
    head, body = name_and_arguments(written, _SEPARATOR)
    if head != "function" or body.lstrip().startswith("{"):
        return read_arguments(head, body)
    name, _, arguments = body.strip().partition("\n")
    arguments = arguments.strip()
    if arguments.startswith(_FENCE):
        arguments = arguments.removesuffix(_FENCE).partition("\n")[2]
    return read_arguments(name.strip(), arguments)
