"""Every format: pieces of any size, hostile text, the limits of calls, and what is particular to each."""

import itertools
import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.environments.turn_parsing import parse_turn
from megarl.tool_formats import FORMATS
from megarl.tool_formats.calls import MAX_CALLS, MAX_DEPTH
from megarl.tool_formats.reader import CONTENT, Said, TurnReader, Until, joined
from tests.helpers.tiers import by_default

FUZZ = settings(max_examples=300, deadline=None, derandomize=True, database=None)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string"}}}}}]  # fmt: skip
PIECES = ['{"name": "f", "arguments": {"x": 1}}', '{"name": "f", "parameters": {"x": 1}}', '{"x": 1}', "[", "{", "]",
          "}", ";", " ", "\n", "f", "é", "\ud800", '"', "```json\n", "\n```", "<", "assistant", " to=functions.f",
          "analysis", "commentary", "final", "function", "functions.f:0", "<function=f>", "</function>",
          "<parameter=x>", "</parameter>", "1e999", "9" * 5000]  # fmt: skip
# Format -> a call of f whose arguments are JSON, or one argument x; what is written before several calls.
CALLS = {
    "hermes": '<tool_call>{"name": "f", "arguments": %s}</tool_call>',
    "deepseek": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>%s<｜tool▁call▁end｜>",
    "kimi": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>%s<|tool_call_end|>",
    "gpt-oss": "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>%s<|call|>",
    "mistral": "[TOOL_CALLS]f[ARGS]%s",
    "llama": '<|python_tag|>{"name": "f", "parameters": %s}',
}
PLAIN = {
    "glm": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "qwen3-coder": "<tool_call>\n<function=f>\n<parameter=x>\n%s\n</parameter>\n</function>\n</tool_call>",
}


def texts(form):
    return st.lists(st.sampled_from([*form.all_marks, *form.all_marks, *PIECES]), max_size=16).map("".join)


def read(form, text, sizes=(), opened=None):
    reader, at, parts = form.reader(TOOLS, opened), 0, []
    for size in sizes:
        parts += reader.feed(text[at : at + size])
        at += size
    return [*parts, *reader.feed(text[at:]), *reader.finish()]


@pytest.mark.parametrize("name", by_default(FORMATS, ("hermes", "gpt-oss")))
def test_how_the_text_is_cut_does_not_matter(name):
    form = FORMATS[name]

    @FUZZ
    @given(
        text=texts(form), sizes=st.lists(st.integers(0, 9), max_size=30), opened=st.sampled_from([None, True, False])
    )
    def holds(text, sizes, opened):
        whole, cut, single = (read(form, text, each, opened) for each in ((), sizes, [1] * len(text)))
        assert joined(whole) == joined(cut) == joined(single)
        contents = ["".join(p.text for p in parts if p[0] == CONTENT) for parts in (whole, cut, single)]
        assert contents[0] == contents[1] == contents[2]

    holds()


@pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
def test_any_text_is_a_turn_that_programs_can_handle(form):
    @FUZZ
    @given(texts(form))
    def holds(text):
        turn = parse_turn(text, 0, form, TOOLS)
        assert pickle.loads(pickle.dumps(turn)) == turn
        for each in (turn.text, turn.content, turn.reasoning, *turn.errors):
            each.encode()
        assert len({call.id for call in turn.calls}) == len(turn.calls)
        for call in turn.calls:
            json.dumps([call.id, call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()

    holds()


def test_no_mark_is_part_of_another():
    """Otherwise it would depend on the pieces which of them is found."""
    for form in FORMATS.values():
        assert not [pair for pair in itertools.permutations(form.all_marks, 2) if pair[0] in pair[1]]


@pytest.mark.parametrize("name", by_default(FORMATS, ("hermes", "mistral", "qwen3-coder", "llama")))
def test_a_megabyte_of_marks(name):
    """Nothing takes more than linear time: with a quadratic step this test takes hours."""
    form = FORMATS[name]
    starts = (*form.all_marks, CALLS.get(name, PLAIN.get(name, "%s")).partition("%s")[0])
    for start, again in itertools.product(
        starts, (*form.all_marks, "{", '{"x":', " ", "\n", "<parameter=x></parameter>")
    ):
        size = 200_000 // len(again)
        for text in (start + again * size, (start + again) * (200_000 // len(start + again))):
            turn = parse_turn(text, 0, form)
            assert len(turn.calls) <= MAX_CALLS and all(len(error) < 300 for error in turn.errors)


@pytest.mark.long
def test_an_answer_of_single_characters_takes_linear_time():
    for form, character in itertools.product(FORMATS.values(), " {<a"):
        reader = form.reader()
        for _ in range(50_000):
            reader.feed(character)
        reader.finish()


@pytest.mark.parametrize("name", CALLS)
def test_limits_of_calls(name):
    form, call = FORMATS[name], CALLS[name]
    good = parse_turn(call % '{"x": [1, "é"]}', 3, form)
    assert [(each.name, each.arguments) for each in good.calls] == [("f", {"x": [1, "é"]})] and good.errors == ()
    deepest, deeper = ('{"x":' * levels + "1" + "}" * levels for levels in (MAX_DEPTH, MAX_DEPTH + 1))
    assert len(parse_turn(call % deepest, 0, form).calls) == 1
    for arguments, error in [
        (deeper, "the arguments of 'f' are nested more than 64 levels deep"), ("[" * 100_000, "malformed JSON: nested"),
        ('{"x": 1e999}', "the arguments of 'f' hold a number that is too large"), ('{"x": NaN}', "malformed JSON: NaN"),
        ('{"x": %s}' % ("9" * 5000), "malformed JSON: a number has too many digits"), ("{", "malformed JSON: "),
        ("[1]", "the arguments of 'f' must be a JSON object"),
    ]:  # fmt: skip
        turn = parse_turn(call % arguments, 0, form)
        assert turn.calls == () and len(turn.errors) == 1 and turn.errors[0].startswith(error), arguments[:40]
    half = parse_turn(call % '{"\\ud800\\udc00": "a\\ud800b"}', 0, form)
    assert half.calls[0].arguments == {"\U00010000": "a\ufffdb"}
    assert parse_turn(call % '{"x": 1, "x": 2}', 0, form).calls[0].arguments == {"x": 2}
    for wrong in ("", " ", "g" * 257):
        turn = parse_turn(call.replace('"f"', f'"{wrong}"').replace(">f<", f">{wrong}<").replace("functions.f", wrong)
                          .replace("]f[", f"]{wrong}[") % "{}", 0, form)  # fmt: skip
        assert turn.calls == (), wrong


@pytest.mark.parametrize("name", [*CALLS, *PLAIN])
def test_a_turn_has_a_limited_number_of_calls(name):
    call = CALLS[name] % '{"x": 1}' if name in CALLS else PLAIN[name] % 1
    turn = parse_turn(call * 500, 0, FORMATS[name], TOOLS)
    assert len(turn.calls) == MAX_CALLS and turn.errors == ("more than 128 calls in a turn",)
    assert parse_turn(call * MAX_CALLS, 0, FORMATS[name], TOOLS).errors == ()


@pytest.mark.parametrize("name", PLAIN)
def test_types_of_plain_arguments(name):
    def value(text, schema):
        tools = [3, {"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}]
        (call,) = parse_turn(PLAIN[name] % text, 0, FORMATS[name], tools).calls
        return call.arguments["x"]

    string, either = {"type": "string"}, {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    for text in ("5", "null", '"a"', " a\n b ", "{}", "é\n", "<b>", "True"):
        assert value(text, string) == text
    for text, schema, wanted in [
        ("5", {"type": "integer"}, 5), ("True", {"type": "boolean"}, True), ("false", {"type": "boolean"}, False),
        ("None", {"type": "null"}, None), ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("a", {"type": "integer"}, "a"), ("5", either, 5), ("[5]", either, "[5]"), ("x", either, "x"),
        ("null", string | {"nullable": True}, None),
        ("5", {"type": ["number", "string"]}, 5), ("5", None, 5), ("x", {}, "x"), ('"x"', {}, '"x"'), ("{", 7, "{"),
        ("1e999", {"type": ["object", "string"]}, "1e999"), ("[" * 5000, {"type": "array"}, "[" * 5000),
    ]:  # fmt: skip
        found = value(text, schema)
        assert found == wanted and type(found) is type(wanted), (text, schema)


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
    turn = parse_turn(f"a<tool_call>{inside}</tool_call>b", 0, FORMATS[name], TOOLS)
    assert turn.content == "a\nb" and turn.calls == () and len(turn.errors) == 1


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
])  # fmt: skip
def test_turns(name, text, reasoning, content, calls):
    turn = parse_turn(text, 0, FORMATS[name], TOOLS)
    assert (turn.reasoning, turn.content, turn.errors) == (reasoning, content, ())
    assert [(call.name, call.arguments) for call in turn.calls] == [("f", each) for each in calls]


@pytest.mark.parametrize("name, text, error", [
    ("mistral", "[TOOL_CALLS]f", "malformed JSON"), ("mistral", "[TOOL_CALLS][]", "a call must be a JSON object"),
    ("llama", "<|python_tag|>print(1)", "malformed JSON"), ("llama", "<|python_tag|>", "a call must be a JSON object"),
    ("llama", '{"name": "f", "parameters": {', "malformed JSON"),
    ("deepseek", "<｜tool▁call▁begin｜>f", "a call must have"),
    ("kimi", "<|tool_call_begin|>f<|tool_call_end|>", "a call must have"),
    ("gpt-oss", "<|channel|>analysis to=python<|message|>print(1)", "malformed JSON"),
])  # fmt: skip
def test_errors(name, text, error):
    turn = parse_turn(text, 0, FORMATS[name])
    assert turn.calls == () and len(turn.errors) == 1 and turn.errors[0].startswith(error)


def test_ids_that_results_refer_to():
    """Kimi's are those that the policy wrote, Mistral's have nine letters and digits."""
    call = "<|tool_call_begin|>%s<|tool_call_argument_begin|>{}<|tool_call_end|>"
    written = ["functions.f:0", "functions.f:1", "functions.f:1", "functions.f b:2", f"functions.f:{'1' * 300}"]
    turn = parse_turn("".join(call % each for each in written), 7, FORMATS["kimi"])
    assert [each.id for each in turn.calls] == ["functions.f:0", "functions.f:1", "call_7_2", "call_7_3", "call_7_4"]
    assert [each.name for each in turn.calls] == ["f", "f", "f", "f b", "f"]
    written = ["abcdefgh1", "abcdefgh1", "c00700003", "a", "abcdefg-1", ""]
    text = "".join(f"[TOOL_CALLS]f[CALL_ID]{each}[ARGS]{{}}" for each in written)
    ids = [each.id for each in parse_turn(text, 7, FORMATS["mistral"]).calls]
    assert ids == ["abcdefgh1", "c00700001", "c00700003", "c00700131", "c00700004", "c00700005"]


def test_what_a_grammar_does_not_read_is_content():
    def ends_early():
        yield Until(("|",))

    reader = TurnReader(ends_early())
    assert [*reader.feed("a|b"), *reader.feed("c")] == [Said(CONTENT, "b"), Said(CONTENT, "c")]


def test_it_imports_no_torch():
    modules = "megarl.tool_formats.chosen_format"
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'jinja2', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
