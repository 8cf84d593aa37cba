"""Tool calls of each format, and turns with them."""

from megarl.environments.protocol import Turn, parse_turn
from megarl.tool_formats import FORMATS

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string"}}}}}]  # fmt: skip
# Format -> a call of f whose arguments are JSON, or one argument x.
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


def nested(levels: int) -> str:
    return '{"x":' * levels + "1" + "}" * levels


def turn_of(name: str, text: str, number: int = 0) -> Turn:
    """A turn in the format of this name."""
    return parse_turn(text, number, FORMATS[name], TOOLS)


def check_turn(name: str, text: str, reasoning: str, content: str, calls: list[dict]):
    """A turn has these parts, and calls of f with these arguments."""
    turn = turn_of(name, text)
    assert (turn.reasoning, turn.content, turn.errors) == (reasoning, content, ())
    assert [(call.name, call.arguments) for call in turn.calls] == [("f", each) for each in calls]


def check_error(name: str, text: str, error: str, content: str = ""):
    """A turn has nothing but one text that is no call, for this reason, and the content."""
    turn = turn_of(name, text)
    assert turn.calls == () and turn.content == content
    assert len(turn.errors) == 1 and turn.errors[0].startswith(error)
