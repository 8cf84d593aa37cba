"""What is particular to each format."""

import pytest

from megarl.environments.protocol import ToolCall
from megarl.tool_formats.written_calls import MAX_CALLS
from tests.helpers.texts.tool_calls import check_error, check_turn, turn_of

ONE = '{"name": "f", "arguments": {"x": [1]}}'


@pytest.mark.parametrize("name, inside", [
    ("glm", "f<arg_key>x</arg_key>1"), ("glm", "f<arg_key>x<arg_value>1</arg_value>"), ("glm", ""),
    ("glm", "f<arg_key>x</arg_key>y<arg_value>1</arg_value>"),
    ("glm", "f<arg_key>x</arg_key><arg_value>1</arg_value>y"),
    ("qwen3-coder", "f"), ("qwen3-coder", '{"name": "f"}'), ("qwen3-coder", "<function=f"),
    ("qwen3-coder", "<function=f><parameter=x>1</function>"), ("qwen3-coder", "<function=><parameter=x>1</parameter>"),
    ("qwen3-coder", "<function=f><parameter=x>1</parameter>y</function>"), ("qwen3-coder", "y<function=f></function>"),
    ("glm", "f<arg_key>x</arg_key><arg_value>1e999</arg_value>"),
])  # fmt: skip
def test_what_looks_like_a_call_and_is_none(name, inside):
    check_error(name, f"a<tool_call>{inside}</tool_call>b", "", "a\nb")


@pytest.mark.parametrize("name, text, reasoning, content, calls", [
    ("qwen3-coder", "a\n<function=f>\n</function>", "", "a", [{}]),
    ("qwen3-coder", "<tool_call><function=f><parameter=s>\n\na\n\n</parameter>", "", "", [{"s": "\na\n"}]),
    ("deepseek", "b</think>a<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>f<｜tool▁sep｜> <｜tool▁calls▁end｜>c", "b",
     "a\nc", [{}]),
    ("kimi", "<think>b</think>a<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}"
             "<|tool_call_begin|>f:12<|tool_call_argument_begin|>{}", "b", "a", [{}, {}]),
    ("gpt-oss", "<|channel|>analysis<|message|>b<|end|><|start|>assistant<|channel|>analysis<|message|>c<|end|>"
                "<|start|>assistant<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>d",
     "b\nc", "a\nd", []),
    ("gpt-oss", ' to=f<|channel|>commentary json<|message|>{"x": 1}', "", "", [{"x": 1}]),
    ("gpt-oss", "a to=functions.f b", "", "a to=functions.f b", []),
    ("gpt-oss", "<|channel|>analysis<|message|>b<|start|>assistant<|channel|>final<|message|>a<|end|><|start|>assis",
     "b", "a", []),
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
    ("deepseek", "<｜tool▁call▁begin｜>f", "a call must have"),
    ("kimi", "<|tool_call_begin|>f<|tool_call_end|>", "a call must have"),
    ("gpt-oss", "<|channel|>analysis to=python<|message|>print(1)", "malformed JSON"),
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
