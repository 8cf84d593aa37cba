"""Arguments in plain text: what they are, by the schema of the tool."""

import pytest

from megarl.environments.protocol import parse_turn
from megarl.tool_formats import FORMATS
from tests.helpers.texts.tool_calls import PLAIN


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
