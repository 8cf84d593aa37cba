"""The format that `--tool-call-parser` names, and the one in which a chat template writes calls.

That is the first one that reads what the template writes of a probe.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl import plugins
from megarl.data.messages import tool_call
from megarl.errors import UsageError
from megarl.tool_formats import FORMATS
from megarl.tool_formats.reader import CONTENT, Grammar, Until, joined
from megarl.tool_formats.tool_format import TextParser, ToolFormat
from megarl.tool_formats.written_calls import WrittenCall

if TYPE_CHECKING:  # it imports Jinja
    from megarl.data.chat import ChatTemplate

AUTO = "auto"  # the format in which the chat template writes calls
FALLBACK = "hermes"  # of a template whose calls no format reads
FLAG = "--tool-call-parser"
_PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "string"}}, "required": []}
_TOOL = {"type": "function", "function": {"name": "probe", "description": "A tool.", "parameters": _PARAMETERS}}
_CALL = WrittenCall("probe", {"x": 12, "y": 'a "b"'})
# Ids of the call: one that every template accepts, and one with the name, which the template may leave out (Kimi).
_IDS = "call00001", "functions.probe:0"


def load_format(name: str) -> ToolFormat:
    """The format of a name, or of a user's function. UsageError for another name."""
    if name in FORMATS:
        return FORMATS[name]
    caller = f"{FLAG} {name}"
    with plugins.kept(caller):
        parser = plugins.load(FLAG, name, dict.fromkeys([AUTO, *FORMATS]), takes=("text",))
    return user_format(plugins.keeping(caller, parser))


def user_format(parser: TextParser) -> ToolFormat:
    """The format that a user's function reads, whose grammar knows thoughts alone."""

    def content(_) -> Grammar:
        yield Until((), CONTENT)

    return ToolFormat(content, parser=parser)


def name_of(value: str, template: "ChatTemplate | None") -> str:
    """The name of a format for `--tool-call-parser`: of "auto", the one in which the chat template writes calls."""
    return value if value != AUTO else template and _found_format(template) or FALLBACK


def unread_calls(value: str, template: "ChatTemplate | None") -> str | None:
    """What is wrong with `--tool-call-parser auto` and a template whose calls no format reads; None if one does."""
    if value != AUTO or template is None or _found_format(template) is not None:
        return None
    if not any(_CALL.name in written for written in _written_calls(template)):
        return None  # it writes none
    formats = ", ".join(FORMATS)
    return f"--tool-call-parser {AUTO}: no format reads the calls that {template.flag} writes; name one of {formats}"


@functools.lru_cache(maxsize=4)  # a start asks several times for the policy's, and the probe is rendered for each
def _found_format(template: "ChatTemplate") -> str | None:
    for (name, each), written in itertools.product(FORMATS.items(), _written_calls(template)):
        reader = each.reader([_TOOL])
        found = joined([*reader.feed(written), *reader.finish()])
        if [call._replace(id=None) for call in found.calls] == [_CALL] and not found.errors:
            return name
    return None


def _written_calls(template: "ChatTemplate") -> list[str]:
    return [written for call_id in _IDS if (written := _written_call(template, call_id))]


def _written_call(template: "ChatTemplate", call_id: str) -> str | None:
    """A turn with a call as the template writes it, up to the token that ends it; None if the template fails."""
    before: Sequence[dict] = [{"role": "user", "content": "q"}]
    turn = {"role": "assistant", "content": "", "tool_calls": [tool_call(call_id, _CALL.name, _CALL.arguments)]}
    try:
        opened = template.render(before, add_generation_prompt=True, tools=[_TOOL])
        whole = template.render([*before, turn], tools=[_TOOL])
    except UsageError:
        return None
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(opened, whole, strict=False))
    written = whole[sum(1 for _ in same) :]
    ends = [written.find(token) for token in template.tokenizer.end_tokens]
    return template.plain(written[: min([end for end in ends if end >= 0], default=None)])
