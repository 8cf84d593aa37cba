"""All formats by the name of `--tool-call-parser`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl import plugins, process_state
from megarl.tool_formats import deepseek, glm, harmony, hermes, kimi, llama, mistral, plain_json, qwen_coder
from megarl.tool_formats.reader import CONTENT, Grammar, GrammarRule, TurnReader, Until
from megarl.tool_formats.thoughts import THINK, ThoughtMarks, thoughts
from megarl.tool_formats.typed_arguments import Tools

AUTO = "auto"  # the format in which the chat template writes calls (`by_template.py`)
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
    "hermes": ToolFormat(hermes.hermes, hermes.MARKS, has_apart=False),
    "qwen3-coder": ToolFormat(qwen_coder.qwen_coder, qwen_coder.MARKS),
    "deepseek": ToolFormat(deepseek.deepseek, deepseek.MARKS),
    "glm": ToolFormat(glm.glm, glm.MARKS),
    "kimi": ToolFormat(kimi.kimi, kimi.MARKS, writes_ids=True),
    "gpt-oss": ToolFormat(harmony.harmony, harmony.MARKS, thoughts=None),
    "mistral": ToolFormat(mistral.mistral, mistral.MARKS, mistral.THOUGHTS, writes_ids=True, id_length=9),
    "json": ToolFormat(plain_json.plain_json, has_apart=False),
    "llama": ToolFormat(llama.llama, llama.MARKS),
}


def load_format(name: str) -> ToolFormat:
    """The format of a name, or that of package.module:function. UsageError for another name."""
    if name in FORMATS:
        return FORMATS[name]
    caller = f"{FLAG} {name}"
    with process_state.kept(caller):
        return user_format(process_state.keeping(caller, plugins.load(FLAG, name, dict.fromkeys([AUTO, *FORMATS]))))


def user_format(parser: TextParser) -> ToolFormat:
    """The format that a user's function reads."""
    return ToolFormat(_content, parser=parser)


def _content(tools: Tools) -> Grammar:
    """The grammar of turns without calls."""
    yield Until((), CONTENT)
