"""What is particular to each format with marks."""

import pytest

from tests.helpers.texts.tool_calls import check_error, check_turn


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
])  # fmt: skip
def test_turns(name, text, reasoning, content, calls):
    check_turn(name, text, reasoning, content, calls)


@pytest.mark.parametrize("name, text, error", [
    ("deepseek", "<｜tool▁call▁begin｜>f", "a call must have"),
    ("kimi", "<|tool_call_begin|>f<|tool_call_end|>", "a call must have"),
    ("gpt-oss", "<|channel|>analysis to=python<|message|>print(1)", "malformed JSON"),
])  # fmt: skip
def test_errors(name, text, error):
    check_error(name, text, error)
