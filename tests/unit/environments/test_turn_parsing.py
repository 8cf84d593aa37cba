"""Turns read from hostile text: reasoning, content, calls, errors."""

import json
import math
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.environments.protocol import ToolCall
from megarl.environments.turn_parsing import parse_turn
from megarl.errors import UsageError
from megarl.serving.answer_text import ToolCallParser
from megarl.tool_formats.calls import MAX_CALLS, MAX_DEPTH
from megarl.tool_formats.table import FORMATS, load_format, user_format

HERMES, JSON_TEXT = FORMATS["hermes"], FORMATS["json"]
FUZZ = settings(max_examples=400, deadline=None, derandomize=True, database=None)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
PIECES = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f", "arguments": {"x": 1}}',
          '{"name": "g"}', '{"name": ', '"arguments": {"x": ', "}}", "[", "]", ",", "{}", "NaN", "1e999", "9" * 5000,
          '"\\ud800"', "\ud800", "```json\n", "\n```", "null", '"', "\\", "a", " ", "\n", CALL]  # fmt: skip
HOSTILE = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["name", "arguments", "x"]), inner, max_size=3), max_leaves=8)  # fmt: skip


def nested(levels):
    return '{"x":' * levels + "1" + "}" * levels


def hermes(text):
    return parse_turn(text, 2, HERMES)


def test_thoughts_content_and_calls():
    turn = hermes(f"<think>\nI say <tool_call>\n</think>\n\nLet us see.\n{CALL}\n{CALL} Done. ")
    assert turn.reasoning == "I say <tool_call>" and turn.content == "Let us see.\nDone." and turn.errors == ()
    assert turn.calls == (ToolCall("call_2_0", "f", {"x": 1}), ToolCall("call_2_1", "f", {"x": 1}))
    assert turn.number == 2 and turn.text.startswith("<think>\nI say")


@pytest.mark.parametrize("text, reasoning, content", [
    ("a", "", "a"), ("b</think>a", "b", "a"), (" <think> b </think> a </think>", "b", "a </think>"),
    ("</think>", "", ""), ("<think></think>", "", ""), ("a <think>b", "", "a <think>b"),
    # Thoughts that do not end: nothing in them is a call.
    (f"<think>b {CALL}", f"b {CALL}", ""), (f"b {CALL}</think>a", f"b {CALL}", "a"),
])  # fmt: skip
def test_thoughts(text, reasoning, content):
    turn = hermes(text)
    assert (turn.reasoning, turn.content, turn.calls, turn.errors) == (reasoning, content, (), ())


@pytest.mark.parametrize("inside, error", [
    ("", "malformed JSON: Expecting value at character 0"),
    ('{"name": "f", "arguments": {"x": 1}', "malformed JSON: Expecting ',' delimiter at character 35"),
    ('{"name": "f"} x', "malformed JSON: Extra data at character 14"),
    ("[1]", "a call must be a JSON object with name and arguments"),
    ('{"arguments": {}}', "the call has no name"), ('{"name": 3}', "the call has no name"),
    ('{"name": "\\ud800"}', "the call has no name"), ('{"name": " "}', "a name has 1 to 256 characters"),
    ('{"name": "%s"}' % ("f" * 257), "a name has 1 to 256 characters"),
    ('{"name": "f", "arguments": "x"}', "the arguments of 'f' must be a JSON object"),
    ('{"name": "f", "arguments": null}', "the arguments of 'f' must be a JSON object"),
    ('{"name": "f", "arguments": {"x": NaN}}', "malformed JSON: NaN is not allowed at character 0"),
    ('{"name": "f", "arguments": {"x": 1e999}}', "the arguments of 'f' hold a number that is too large"),
    ('{"name": "f", "arguments": {"x": %s}}' % ("9" * 5000), "malformed JSON: a number has too many digits"),
    ("[" * 100_000, "malformed JSON: nested too deeply"),
    (f'{{"name": "f", "arguments": {nested(65)}}}', "the arguments of 'f' are nested more than 64 levels deep"),
])  # fmt: skip
def test_what_looks_like_a_call_and_is_none(inside, error):
    turn = hermes(f"a<tool_call>{inside}</tool_call>b{CALL}")
    assert turn.content == "a\nb" and len(turn.errors) == 1 and turn.errors[0].startswith(error)
    assert len(turn.calls) == 1 and turn.calls[0].id == "call_2_0"


def test_what_is_a_call():
    texts = ['{"name": "f"}', ' \n{"arguments": {}, "name": "f", "id": 3} ', '{"name": "g", "name": "f"}',
             f'{{"name": "f", "arguments": {nested(MAX_DEPTH)}}}']  # fmt: skip
    for text in texts:
        assert [call.name for call in hermes(f"<tool_call>{text}").calls] == ["f"]
    (call,) = hermes('<tool_call>{"name": "f", "arguments": {"\\ud800\\udc00": "a\\ud800b"}}').calls
    assert call.arguments == {"\U00010000": "a\ufffdb"}


def test_calls_as_plain_json():
    one = '{"name": "f", "arguments": {"x": [1]}}'
    for text in (one, f" {one}\n", f"[{one}]", f"```json\n{one}\n```", f"```\n[{one}]\n```", f"hm</think>{one}"):
        turn = parse_turn(text, 0, JSON_TEXT)
        assert turn.calls == (ToolCall("call_0_0", "f", {"x": [1]}),) and turn.content == "" and not turn.errors
    assert len(parse_turn(f"[{one}, {one}]", 0, JSON_TEXT).calls) == 2
    for text in (
        "[1, 2]",
        '{"name": "Bob"}',
        "{x | x > 0}",
        "[see above]",
        f"It is {one}",
        "",
        "```python\n1\n```",
        "7",
    ):
        turn = parse_turn(text, 0, JSON_TEXT)
        assert turn.content == text and not turn.calls and not turn.errors


@pytest.mark.parametrize("text, error", [
    ('{"name": "f", "arguments": {', "malformed JSON: Expecting property name"),
    ('[{"arguments": 1', "malformed JSON: Expecting ',' delimiter"), ('{"arguments": {}}', "the call has no name"),
    ('{"name": "f", "arguments": "x"}', "the arguments of 'f' must be"),
    ('[3, {"name": "f", "arguments": {}}]', "a call must be a JSON object"),
])  # fmt: skip
def test_plain_json_that_looks_like_a_call(text, error):
    turn = parse_turn(text, 0, JSON_TEXT)
    assert len(turn.errors) == 1 and turn.errors[0].startswith(error) and turn.content == ""


def test_a_turn_has_a_limited_number_of_calls():
    for turn in (hermes(CALL * 500), parse_turn(f"[{','.join([CALL[12:-13]] * 500)}]", 0, JSON_TEXT)):
        assert len(turn.calls) == MAX_CALLS and turn.errors == ("more than 128 calls in a turn",)
    assert hermes(CALL * MAX_CALLS).errors == ()


@pytest.mark.parametrize("text", [
    "<tool_call>" * 90_000, "<tool_call></tool_call>" * 45_000, "</tool_call>" * 80_000, "<think>" * 140_000,
    "</think>" * 120_000, "```json\n" + "\n" * 10**6, '{"name": ' * 100_000, '[{"name":' + " " * 10**6, "\\" * 10**6,
    '<tool_call>{"name": "f", "arguments": ' + '[{"x":' * 150_000, "\ud800" * 10**6,
])  # fmt: skip
@pytest.mark.parametrize("form", [HERMES, JSON_TEXT], ids=["hermes", "json"])
def test_a_megabyte_of_marks(text, form):
    turn = parse_turn(text, 0, form)
    assert turn.calls == () and len(turn.errors) <= MAX_CALLS + 1 and all(len(error) < 300 for error in turn.errors)


@FUZZ
@given(HOSTILE)
def test_any_text_is_a_turn_that_programs_can_handle(text):
    for form in (HERMES, JSON_TEXT):
        turn = parse_turn(text, 0, form)
        assert pickle.loads(pickle.dumps(turn)) == turn
        for each in (turn.text, turn.content, turn.reasoning, *turn.errors):
            each.encode()
        for call in turn.calls:
            json.dumps(call.arguments, ensure_ascii=False, allow_nan=False).encode()


@FUZZ
@given(HOSTILE)
def test_the_servers_parser_finds_the_same_calls(text):
    """It reads the text in pieces, and leaves thoughts of Hermes in the content."""
    parser = ToolCallParser(HERMES)
    calls = parser.feed(text).calls + parser.finish().calls
    streamed = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]
    turn = parse_turn(f"</think>{text}", 0, HERMES)
    assert [(call.name, call.arguments) for call in turn.calls] == streamed


@FUZZ
@given(JSON)
def test_json_values_are_read_as_json_reads_them(value):
    written = json.dumps(value)
    turn = hermes(f"<tool_call>{written}</tool_call>")
    is_call = (isinstance(value, dict) and isinstance(value.get("name"), str) and value["name"].strip() != ""
               and isinstance(value.get("arguments", {}), dict) and is_finite(value))  # fmt: skip
    if is_call:
        assert [(call.name, call.arguments) for call in turn.calls] == [(value["name"], value.get("arguments", {}))]
        assert turn.errors == ()
    else:
        assert turn.calls == () and len(turn.errors) == 1
    plain = parse_turn(written, 0, JSON_TEXT)
    if is_call and "arguments" in value:
        assert plain.calls == (ToolCall("call_0_0", value["name"], value["arguments"]),) and plain.content == ""
    elif not isinstance(value, list):
        assert plain.calls == ()


def is_finite(value):
    if isinstance(value, float):
        return math.isfinite(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return all(map(is_finite, inner))


def shouts(text):
    """A parser of a user: lines in capitals are calls."""
    if "!" in text:
        raise KeyError("no exclamations")
    return "", [(line.lower(), {}) for line in text.split("\n")], ["half a call"]


def test_a_parser_of_a_user():
    form = load_format(f"{__name__}:shouts")
    turn = parse_turn("b</think>GO\nSTOP", 1, form)
    assert [(call.id, call.name) for call in turn.calls] == [("call_1_0", "go"), ("call_1_1", "stop")]
    assert turn.errors == ("half a call",) and turn.reasoning == "b"
    broken = parse_turn("GO!", 1, form)
    assert broken.content == "GO!" and broken.calls == () and broken.errors == ("KeyError: 'no exclamations'",)
    assert parse_turn(" <think>b", 1, form).content == "" and parse_turn(" a\n", 1, form).calls[0].name == " a"
    wrong = parse_turn("a", 1, user_format(lambda text: ("", [(3, {}), ("f", []), ("g", {})], [])))
    assert [call.name for call in wrong.calls] == ["g"] and len(wrong.errors) == 2
    assert parse_turn("a", 1, user_format(lambda text: None)).errors[0].startswith("TypeError")
    with pytest.raises(
        UsageError, match="^--tool-call-parser xml: unknown; allowed: auto, hermes, qwen3-coder, .*json, "
    ):
        load_format("xml")


def test_it_imports_no_torch():
    code = "import sys, megarl.environments.turn_parsing; sys.exit('torch' in sys.modules or 'jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
