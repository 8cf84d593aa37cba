"""All formats by the name of `--tool-call-parser`, and the one in which a chat template writes calls.

That is the first one that reads what the template writes of a probe.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl import plugins
from megarl.data.messages import tool_call
from megarl.errors import UsageError
from megarl.tool_formats import harmony, json_formats, marked_formats
from megarl.tool_formats.calls import MAX_CALLS, WrittenCall
from megarl.tool_formats.reader import (
    CONTENT,
    THINK,
    Grammar,
    GrammarRule,
    ThoughtMarks,
    TurnReader,
    Until,
    joined,
    thoughts,
)
from megarl.tool_formats.typed_arguments import Tools

if TYPE_CHECKING:  # it imports Jinja
    from megarl.data.chat import ChatTemplate

AUTO = "auto"  # the format in which the chat template writes calls
FALLBACK = "hermes"  # of a template whose calls no format reads
FLAG = "--tool-call-parser"
# A user's parser: text without thoughts -> (content, calls as (name, arguments), why what looks like a call is none).
TextParser = Callable[[str], tuple[str, list[tuple[str, dict[str, Any]]], list[str]]]


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes thoughts, content and tool calls.

    Attributes:
        rule: makes the grammar of what follows the thoughts, from the tools of the conversation.
        marks: strings that a text needs to have where they are special tokens.
        thoughts: marks around the thoughts at the start of a turn; None: the grammar reads them.
        has_apart: whether answers of the server have thoughts apart from the content.
        writes_ids: whether results of tools refer to the ids that the policy writes.
        id_length: characters, letters and digits, that an id must have; None: any.
        parser: of a user, which reads whole turns.
    """

    rule: GrammarRule
    marks: tuple[str, ...] = ()
    thoughts: tuple[str, str] | None = THINK
    has_apart: bool = True
    writes_ids: bool = False
    id_length: int | None = None
    parser: TextParser | None = None

    @property
    def all_marks(self) -> tuple[str, ...]:
        """`marks` with those of thoughts."""
        return self.marks + (self.thoughts or ())

    @property
    def thought_marks(self) -> ThoughtMarks:
        """What ends thoughts, for a thinking budget."""
        return harmony.THOUGHTS if self.thoughts is None else ThoughtMarks(*self.thoughts)

    @property
    def answer_marks(self) -> tuple[str, ...]:
        """Those of an answer of the server."""
        return self.all_marks if self.has_apart else self.marks

    def reader(self, tools: Tools = (), opened: bool | None = None) -> TurnReader:
        """A reader of one turn. `opened`: whether the prompt has begun its thoughts; None: unknown."""
        return TurnReader(self._grammar(tools, opened))

    def answer_reader(self, tools: Tools, opened: bool) -> TurnReader:
        """A reader of one answer of the server."""
        return self.reader(tools, opened) if self.has_apart else TurnReader(self.rule(tools))

    def call_ids(self, calls: Iterable[WrittenCall], turn: int) -> list[str]:
        """An id for each call of a turn: the one that the policy wrote, if the format has such; all differ."""
        found: dict[str, None] = {}
        for index, call in enumerate(calls):
            own = [call.id] if self.accepts_id(call.id) else []
            # Several, since the policy may have written one of them.
            made = (self.call_id(turn, number) for number in itertools.count(index, MAX_CALLS))
            found[next(each for each in itertools.chain(own, made) if each not in found)] = None
        return list(found)

    def call_id(self, turn: int, index: int) -> str:
        """The id of a call to which the policy gave none."""
        return f"call_{turn}_{index}" if self.id_length is None else f"c{turn % 10**3:03}{index % 10**5:05}"

    def accepts_id(self, written: str | None) -> bool:
        """Whether a call keeps the id that the policy gave it."""
        if not self.writes_ids or not written or len(written) > 256 or not written.isprintable() or " " in written:
            return False
        return self.id_length is None or (len(written) == self.id_length and written.isascii() and written.isalnum())

    def _grammar(self, tools: Tools, opened: bool | None) -> Grammar:
        if self.thoughts is not None:
            yield from thoughts(self.thoughts, opened)
        yield from self.rule(tools)


FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(marked_formats.hermes, marked_formats.CALL_MARKS, has_apart=False),
    "qwen3-coder": ToolFormat(marked_formats.qwen_coder, marked_formats.CALL_MARKS),
    "deepseek": ToolFormat(marked_formats.deepseek, marked_formats.DEEPSEEK_MARKS),
    "glm": ToolFormat(marked_formats.glm, marked_formats.GLM_MARKS),
    "kimi": ToolFormat(marked_formats.kimi, marked_formats.KIMI_MARKS, writes_ids=True),
    "gpt-oss": ToolFormat(harmony.harmony, harmony.MARKS, thoughts=None),
    "mistral": ToolFormat(
        json_formats.mistral,
        json_formats.MISTRAL_MARKS,
        json_formats.MISTRAL_THOUGHTS,
        writes_ids=True,
        id_length=9,
    ),
    "json": ToolFormat(json_formats.plain_json, has_apart=False),
    "llama": ToolFormat(json_formats.llama, (json_formats.LLAMA_TAG,)),
}


def load_format(name: str) -> ToolFormat:
    """The format of a name, or that of package.module:function. UsageError for another name."""
    if name in FORMATS:
        return FORMATS[name]
    caller = f"{FLAG} {name}"
    with plugins.kept(caller):
        return user_format(plugins.keeping(caller, plugins.load(FLAG, name, dict.fromkeys([AUTO, *FORMATS]))))


def user_format(parser: TextParser) -> ToolFormat:
    """The format that a user's function reads."""
    return ToolFormat(_content, parser=parser)


def _content(tools: Tools) -> Grammar:
    """The grammar of turns without calls."""
    yield Until((), CONTENT)


# -- the format of a chat template ---------------------------------------------------------------------------

_PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "string"}}, "required": []}
_TOOL = {"type": "function", "function": {"name": "probe", "description": "A tool.", "parameters": _PARAMETERS}}
_CALL = WrittenCall("probe", {"x": 12, "y": 'a "b"'})
# Ids of the call: one that every template accepts, and one with the name, which the template may leave out (Kimi).
_IDS = "call00001", "functions.probe:0"


def name_of(value: str, template: "ChatTemplate | None") -> str:
    """The name of a format for `--tool-call-parser`: of "auto", the one in which the chat template writes calls."""
    return format_of(template) if value == AUTO else value


def unread_calls(value: str, template: "ChatTemplate | None") -> str | None:
    """What is wrong with `--tool-call-parser auto` and a template whose calls no format reads; None if one does."""
    if value != AUTO or template is None or _found_format(template) is not None:
        return None
    if not any(_CALL.name in written for written in _written_calls(template)):
        return None  # it writes none
    formats = ", ".join(FORMATS)
    return f"--tool-call-parser {AUTO}: no format reads the calls that {template.flag} writes; name one of {formats}"


def format_of(template: "ChatTemplate | None") -> str:
    """The name of the format that reads a call which the template has written; `FALLBACK` if none does."""
    return FALLBACK if template is None else _found_format(template) or FALLBACK


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
