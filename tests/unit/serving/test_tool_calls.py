"""Tool calls in generated text that comes in pieces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.serving.tool_calls import ToolCallParser

CALL = '<tool_call>{"name": "f", "arguments": {"a": "<tool"}}</tool_call>'


def parsed(text, sizes=()):
    parser, start = ToolCallParser(), 0
    content, calls = "", []
    for size in [*sizes, len(text)]:
        for found in (parser.feed(text[start : start + size]),):
            content, calls = content + found[0], calls + found[1]
        start += size
    rest = parser.finish()
    return content + rest[0], [call["function"] for call in calls + rest[1]]


@given(
    st.lists(st.sampled_from([CALL, " ", "\n", "a", "<tool_call>", "</tool_call>", "<", "{"])),
    st.lists(st.integers(0, 9)),
)
def test_how_the_text_is_cut_does_not_matter(pieces, sizes):
    text = "".join(pieces)
    assert parsed(text, sizes) == parsed(text)
    if CALL not in text and "<tool_call>" not in text:
        assert parsed(text) == (text, [])


@pytest.mark.parametrize("text, content, count", [
    (f"a \n{CALL}\n{CALL} \n", "a", 2), (f"{CALL} b ", "b ", 1), (CALL.removesuffix("</tool_call>"), "", 1),
    ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", 0), ("a <tool_call>{\n", "a <tool_call>{\n", 0),
    ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', 0),
    ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', None, 0),
    ('<tool_call>{"name": "\\ud800"}</tool_call>', None, 0), ("<tool_call>" + "[" * 10**5, None, 0),
])  # fmt: skip
def test_content_and_calls(text, content, count):
    found, calls = parsed(text)
    assert found == (text if content is None else content) and len(calls) == count


def test_arguments_are_always_valid_unicode():
    _, calls = parsed('<tool_call>{"name": "f", "arguments": {"é": "\\ud800"}}</tool_call>')
    assert json.loads(calls[0]["arguments"].encode()) == {"é": "\ud800"}
