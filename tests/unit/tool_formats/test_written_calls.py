"""What a call may be, in every format."""

import pytest

from megarl.environments.protocol import parse_turn
from megarl.tool_formats import FORMATS
from megarl.tool_formats.written_calls import MAX_CALLS, MAX_DEPTH
from tests.helpers.texts.tool_calls import CALLS, PLAIN, check_error, nested, turn_of

CALL = CALLS["hermes"] % '{"x": 1}'


@pytest.mark.parametrize("name", CALLS)
def test_limits_of_calls(name):
    call = CALLS[name]
    good = turn_of(name, call % '{"x": [1, "é"]}', 3)
    assert [(each.name, each.arguments) for each in good.calls] == [("f", {"x": [1, "é"]})] and good.errors == ()
    assert len(turn_of(name, call % nested(MAX_DEPTH)).calls) == 1
    for arguments, error in [
        (nested(MAX_DEPTH + 1), "the arguments of 'f' are nested more than 64 levels deep"),
        ("[" * 100_000, "malformed JSON: nested"), ('{"x": NaN}', "malformed JSON: NaN is not allowed"),
        ('{"x": 1e999}', "the arguments of 'f' hold a number that is too large"), ("{", "malformed JSON: "),
        ('{"x": %s}' % ("9" * 5000), "malformed JSON: a number has too many digits"),
        ("[1]", "the arguments of 'f' must be a JSON object"),
    ]:  # fmt: skip
        check_error(name, call % arguments, error)
    half = turn_of(name, call % '{"\\ud800\\udc00": "a\\ud800b"}')
    assert half.calls[0].arguments == {"\U00010000": "a\ufffdb"}
    assert turn_of(name, call % '{"x": 1, "x": 2}').calls[0].arguments == {"x": 2}
    for wrong in ("", " ", "g" * 257):
        renamed = call.replace('"f"', f'"{wrong}"').replace(">f<", f">{wrong}<").replace("functions.f", wrong)
        assert turn_of(name, renamed.replace("]f[", f"]{wrong}[") % "{}").calls == (), wrong


@pytest.mark.parametrize("name", [*CALLS, *PLAIN])
def test_a_turn_has_a_limited_number_of_calls(name):
    call = CALLS[name] % '{"x": 1}' if name in CALLS else PLAIN[name] % 1
    turn = turn_of(name, call * 500)
    assert len(turn.calls) == MAX_CALLS and turn.errors == ("more than 128 calls in a turn",)
    assert turn_of(name, call * MAX_CALLS).errors == ()


@pytest.mark.parametrize("inside, error", [
    ("", "malformed JSON: Expecting value at character 0"),
    ('{"name": "f", "arguments": {"x": 1}', "malformed JSON: Expecting ',' delimiter at character 35"),
    ('{"name": "f"} x', "malformed JSON: Extra data at character 14"),
    ("[1]", "a call must be a JSON object with name and arguments"),
    ('{"arguments": {}}', "the call has no name"), ('{"name": 3}', "the call has no name"),
    ('{"name": "\\ud800"}', "the call has no name"), ('{"name": " "}', "a name has 1 to 256 characters"),
    ('{"name": "%s"}' % ("f" * 257), "a name has 1 to 256 characters"),
    ('{"name": "f", "arguments": null}', "the arguments of 'f' must be a JSON object"),
])  # fmt: skip
def test_what_looks_like_a_call_and_is_none(inside, error):
    turn = turn_of("hermes", f"a<tool_call>{inside}</tool_call>b{CALL}", 2)
    assert turn.content == "a\nb" and len(turn.errors) == 1 and turn.errors[0].startswith(error)
    assert len(turn.calls) == 1 and turn.calls[0].id == "call_2_0"


def test_what_is_a_call():
    for text in ('{"name": "f"}', ' \n{"arguments": {}, "name": "f", "id": 3} ', '{"name": "g", "name": "f"}'):
        assert [call.name for call in turn_of("hermes", f"<tool_call>{text}").calls] == ["f"]


# -- arguments as plain text -------------------------------------------------------------------------------------------


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
