"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>` in a section of calls.

What stands before the arguments is the call's id, which the results of tools refer to.
"""

import re

from megarl.tool_formats.calls import WrittenCall, read_arguments
from megarl.tool_formats.reader import Grammar
from megarl.tool_formats.sections import SectionMarks, name_and_arguments, sectioned

_SECTION = SectionMarks(
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"
)
_SEPARATOR = "<|tool_call_argument_begin|>"
MARKS = (*_SECTION, _SEPARATOR)
_NUMBER = re.compile(r":[0-9]+\Z")


def kimi(tools) -> Grammar:
    """The grammar of `--tool-call-parser kimi`."""
    yield from sectioned(_SECTION, _call)


def _call(written: str) -> WrittenCall:
    written_id, arguments = name_and_arguments(written, _SEPARATOR)
    return read_arguments(_NUMBER.sub("", written_id.removeprefix("functions.")), arguments, written_id)
