"""Chat templates: messages rendered with Jinja as `transformers` renders them, and turned into tokens safely."""

import json
from pathlib import Path
from typing import Any, Iterable, NoReturn, Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox

from megarl.data.messages import Message
from megarl.data.special_tokens import MARK, Marks, encode_pieces, pattern_of
from megarl.data.tokenizers import Tokenizer
from megarl.errors import UsageError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}`: marks an assistant's text in some templates; rendered as it is."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A Jinja template over `messages`, `add_generation_prompt`, `bos_token` and `eos_token`.

    What a template writes of special tokens becomes their ids. What messages write never does: before rendering, the
    strings of special tokens in contents are marked, and only spelt out again, as ordinary text, in the tokens.
    A template finds no clock (`strftime_now` is undefined), so the same messages give the same tokens on every day.
    Raises UsageError (naming `flag`) for a malformed template, or messages that it refuses or fails on.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, flag: str = "--chat-template"):
        self.tokenizer, self.flag = tokenizer, flag
        self._marks = Marks(tokenizer.special)
        self._pattern = pattern_of(tokenizer.special)
        self._names = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"{flag}: malformed Jinja, line {error.lineno}: {_line(error)}") from None
        if MARK in source:
            raise UsageError(f"{flag}: the template holds U+FDD0, which is not a character")

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The conversation as one text, special strings of the contents marked.

        `add_generation_prompt`: ends with what opens the assistant's turn.
        """
        marked = [{**message, "content": self._marks.mark(message["content"])} for message in messages]
        names = {name: token for name, token in self._names.items() if token is not None}
        try:
            return self._template.render(messages=marked, add_generation_prompt=add_generation_prompt, **names)
        except Exception as error:
            raise UsageError(f"{self.flag}: the template does not take these messages: {_line(error)}") from None

    def plain(self, rendered: str) -> str:
        """A rendered text without marks."""
        return self._marks.unmark(rendered)

    def encode(self, rendered: str) -> list[int]:
        """Ids of a rendered text: as a whole where no mark is in it, else in pieces around special tokens."""
        if MARK not in rendered:
            return self.tokenizer.encode_template(rendered)
        return encode_pieces(
            rendered, self.tokenizer.special, self._pattern, lambda piece: self.tokenizer.encode(self.plain(piece))
        )

    def encode_batch(self, rendered: Sequence[str]) -> list[list[int]]:
        """`encode` of each rendered text."""
        whole = iter(self.tokenizer.encode_template_batch([text for text in rendered if MARK not in text]))
        return [self.encode(text) if MARK in text else next(whole) for text in rendered]

    def encode_following(self, continued: Iterable[tuple[str, str]]) -> list[list[int]]:
        """For each (before, text): ids of `text`, such that those of `before` and they make up the whole.

        They are what the tokenizer gives for `text` behind `before`, unless a token would reach across the border:
        then those of `text` alone, as a policy too can only go on behind what it was given.
        """
        tails = [(self._from_last_special(before), text) for before, text in continued]
        leads = self.encode_batch([tail for tail, _ in tails])
        wholes = self.encode_batch([tail + text for tail, text in tails])
        return [
            whole[len(lead) :] if whole[: len(lead)] == lead else self.encode(text)
            for (_, text), lead, whole in zip(tails, leads, wholes, strict=True)
        ]

    def _from_last_special(self, rendered: str) -> str:
        """The end of a text that can bear on the tokens behind it: no token reaches across a special one."""
        start = max((found.start() for found in self._pattern.finditer(rendered)), default=0)
        return rendered[start:]


def load_template(value: str | None, tokenizer: Tokenizer, flag: str = "--chat-template") -> ChatTemplate | None:
    """The template that `--chat-template` names: None, "tokenizer" (the tokenizer's own) or a Jinja file's path."""
    if value is None:
        return None
    if value == "tokenizer":
        if not tokenizer.template:
            raise UsageError(f"{flag} tokenizer: the tokenizer brings no chat template; give a Jinja file")
        return ChatTemplate(tokenizer.template, tokenizer, f"{flag} tokenizer")
    try:
        source = Path(value).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f'{flag} {value}: no such file; allowed: "tokenizer" or a Jinja file') from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {value}: cannot be read: {_line(error)}") from None
    return ChatTemplate(source, tokenizer, f"{flag} {value}")


def _to_json(value: Any, indent=None, separators=None, sort_keys: bool = False) -> str:
    # Jinja's own filter escapes <, > and & for web pages.
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
