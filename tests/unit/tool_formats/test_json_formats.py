"""What is particular to formats of JSON without an end of its own."""

import pytest

from megarl.environments.protocol import ToolCall
from megarl.tool_formats.written_calls import MAX_CALLS
from tests.helpers.texts.tool_calls import check_error, check_turn, turn_of

ONE = '{"name": "f", "arguments": {"x": [1]}}'


@pytest.mark.parametrize("name, text, reasoning, content, calls", [
    ("mistral", '[THINK]b[/THINK]a[TOOL_CALLS] [{"name": "f"}, {"name": "f", "arguments": {"x": 1}}]', "b", "a",
     [{}, {"x": 1}]),
    ("llama", '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {"x": 1}}\n', "", "", [{}, {"x": 1}]),
    ("llama", '{"name": "Bob"}', "", '{"name": "Bob"}', []), ("llama", "{x | x > 0}", "", "{x | x > 0}", []),
    ("llama", 'a <|python_tag|>{"type": "function", "name": "f", "parameters": {}}', "", "a", [{}]),
    ("json", f"[{ONE}, {ONE}]", "", "", [{"x": [1]}] * 2), ("json", f"hm</think>{ONE}", "hm", "", [{"x": [1]}]),
])  # fmt: skip
def test_turns(name, text, reasoning, content, calls):
    check_turn(name, text, reasoning, content, calls)


@pytest.mark.parametrize("name, text, error", [
    ("mistral", "[TOOL_CALLS]f", "malformed JSON"), ("mistral", "[TOOL_CALLS][]", "a call must be a JSON object"),
    ("llama", "<|python_tag|>print(1)", "malformed JSON"), ("llama", "<|python_tag|>", "a call must be a JSON object"),
    ("llama", '{"name": "f", "parameters": {', "malformed JSON"),
    ("json", '{"name": "f", "arguments": {', "malformed JSON: Expecting property name"),
    ("json", '[{"arguments": 1', "malformed JSON: Expecting ',' delimiter"),
    ("json", '{"arguments": {}}', "the call has no name"),
    ("json", '{"name": "f", "arguments": "x"}', "the arguments of 'f' must be"),
])  # fmt: skip
def test_errors(name, text, error):
    check_error(name, text, error)


def test_calls_as_plain_json():
    for text in (ONE, f" {ONE}\n", f"[{ONE}]", f"```json\n{ONE}\n```", f"```\n[{ONE}]\n```"):
        turn = turn_of("json", text)
        assert turn.calls == (ToolCall("call_0_0", "f", {"x": [1]}),) and turn.content == "" and not turn.errors
    for text in ("[1, 2]", '{"name": "Bob"}', "{x | x > 0}", "[see above]", f"It is {ONE}", "", "```python\n1\n```"):
        check_turn("json", text, "", text, [])
    one_is_none = turn_of("json", '[3, {"name": "f", "arguments": {}}]')
    assert len(one_is_none.calls) == 1 and one_is_none.errors[0].startswith("a call must be a JSON object")
    many = turn_of("json", f"[{','.join([ONE] * 500)}]")
    assert len(many.calls) == MAX_CALLS and many.errors == ("more than 128 calls in a turn",)
