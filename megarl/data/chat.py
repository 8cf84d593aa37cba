"""Chat templates: render messages with Jinja as `transformers` does, then tokenize them safely."""

import datetime
import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import jinja2.utils

from megarl import plain_files
from megarl.data import messages
from megarl.data.images.book import Images
from megarl.data.images.names import MARK as IMAGE_MARK
from megarl.data.tokenizers import MARK, Marks, Tokenizer, encode_around_special, pattern_of
from megarl.errors import UsageError
from megarl.plain_files import read_text, reading


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` ... `{% endgeneration %}` around assistant text in some templates; rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


MAX_BYTES = 2**22  # of a template; published ones have some thousand
_MAX_RESULT, _MAX_EXPONENT, _MAX_BASE = 2**20, 64, 2**64
_WIDTH = re.compile(r"\d+")
RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}  # names that options cannot have


class TemplateOptions(NamedTuple):
    """What a template reads besides the messages.

    `values`: variables by name, such as `enable_thinking`. `date`: of `strftime_now`; it is the same on every day, so
    that the same messages give the same tokens.
    """

    values: Mapping[str, Any] = {}
    date: datetime.date = datetime.date(2024, 7, 26)  # what Llama 3 writes for want of a date

    @classmethod
    def of_flags(cls, values: str | None, date: str | None, prefix: str = "") -> "TemplateOptions":
        """Those of `--chat-template-kwargs`, a JSON object, and `--chat-template-date`. UsageError if one is wrong."""
        found = cls()
        if values is not None:
            try:
                parsed = json.loads(values)
            except (ValueError, RecursionError):
                parsed = None
            if not isinstance(parsed, dict) or RESERVED & parsed.keys():
                reserved = ", ".join(sorted(RESERVED))
                raise UsageError(
                    f"--{prefix}chat-template-kwargs {values}: allowed is a JSON object without {reserved}"
                )
            found = found._replace(values=parsed)
        if date is not None:
            try:
                found = found._replace(date=datetime.date.fromisoformat(date))
            except ValueError:
                raise UsageError(
                    f"--{prefix}chat-template-date {date}: allowed is a date such as {found.date}"
                ) from None
        return found


NO_OPTIONS = TemplateOptions()


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which no operator makes a text or number without end."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(self, context, operator, left, right):
        if operator == "**" and not (abs(right) <= _MAX_EXPONENT and abs(left) <= _MAX_BASE):
            raise OverflowError("a power of large numbers")
        if operator == "*":
            for text, times in ((left, right), (right, left)):
                if isinstance(text, str | list | tuple) and isinstance(times, int) and len(text) * times > _MAX_RESULT:
                    raise OverflowError("a text of too many characters")
        if operator == "%" and isinstance(left, str) and any(int(w) > _MAX_RESULT for w in _WIDTH.findall(left)):
            raise OverflowError("a text of too many characters")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A Jinja template over `messages`, `tools`, `add_generation_prompt`, the tokenizer's named tokens, and options.

    Special tokens in the template's own text become their ids. Those in message contents never do: before rendering,
    their strings are replaced by marks, and `encode` tokenizes the original strings as ordinary text.
    Raises UsageError (naming `flag`) for a malformed template, or messages that it rejects or fails on.
    """

    def __init__(
        self,
        source: str,
        tokenizer: Tokenizer,
        flag: str = "--chat-template",
        options: TemplateOptions = NO_OPTIONS,
        images: Images | None = None,
    ):
        """`images`: those that marks in contents may name; None: such marks are text."""
        self.tokenizer, self.flag, self.source, self.options, self.images = tokenizer, flag, source, options, images
        self._marks = Marks(tokenizer.special if images is None else [*tokenizer.special, IMAGE_MARK])
        self._pattern = pattern_of(tokenizer.special)
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = messages.to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["dict"] = _Dict()
        environment.globals["namespace"] = _Namespace
        environment.globals["strftime_now"] = options.date.strftime
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"{flag}: malformed Jinja, line {error.lineno}: {_line(error)}") from None
        except (RecursionError, MemoryError, OverflowError, ValueError, SyntaxError) as error:
            raise UsageError(f"{flag}: cannot be compiled: {type(error).__name__}: {_line(error)[:200]}") from None
        if MARK in source:
            raise UsageError(f"{flag}: the template contains U+FDD0, a Unicode noncharacter; remove it")

    def __reduce__(self):
        return type(self), (self.source, self.tokenizer, self.flag, self.options, self.images)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the conversation as one text, with the special tokens' strings in all but the roles marked.
        `add_generation_prompt`: append the opening of the assistant's turn. `tools`: JSON Schema descriptions of the
        functions that the assistant may call. `values`: variables that go before those of the options.
        """
        of_content, of_thoughts, of_calls = self._forms
        shown = [of_calls(of_content(of_thoughts(message))) for message in messages]
        if self.images is None:
            return self._rendered(shown, add_generation_prompt, tools, values)
        with_parts = map(self.images.with_parts, messages)
        shown = [
            each if isinstance(each["content"], list) else plain for each, plain in zip(with_parts, shown, strict=True)
        ]
        rendered = self._rendered(shown, add_generation_prompt, tools, values)
        return self.images.in_places(rendered, messages, self.flag)

    @functools.cached_property
    def _forms(self) -> tuple[messages.Form, messages.Form, messages.Form]:
        """Those of contents, of thoughts and of calls."""
        of_content = messages.form_of_content(self._probed)

        def probed(messages: Sequence[Mapping[str, Any]]) -> str:
            return self._probed([of_content(message) for message in messages])

        return of_content, messages.form_of_thoughts(probed), messages.form_of_calls(probed)

    def _probed(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of messages in which no special token's string is; "" if the template fails on them."""
        try:
            return self._rendered(messages, False, None, None)
        except UsageError:
            return ""

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        values: Mapping[str, Any] | None,
    ) -> str:
        marked = [
            {name: value if name == "role" else self.marked(value) for name, value in _with_aliases(message).items()}
            for message in messages
        ]
        names = {
            **self.tokenizer.named,
            **self.marked({**self.options.values, **(values or {})}),
            "tools": None if tools is None else self.marked(list(tools)),
            "documents": None,
        }
        try:
            return self._template.render(messages=marked, add_generation_prompt=add_generation_prompt, **names)
        except Exception as error:
            raise UsageError(f"{self.flag}: the template fails on these messages: {_line(error)}") from None

    def marked(self, value: Any) -> Any:
        """A JSON value with all its strings marked, those of keys, too."""
        if isinstance(value, str):
            return self._marks.mark(value)
        if isinstance(value, dict):
            return {self._marks.mark(name): self.marked(each) for name, each in value.items()}
        return [self.marked(each) for each in value] if isinstance(value, list) else value

    def plain(self, rendered: str) -> str:
        """Replace the marks of a rendered text by the original strings."""
        return self._marks.unmark(rendered)

    def encode(self, rendered: str) -> list[int]:
        """Ids of a rendered text: encoded at once if it has no marks, else segment by segment around special tokens."""
        if self.images is not None and IMAGE_MARK in rendered:
            return self.images.encode(rendered, self._encode)
        return self._encode(rendered)

    def _encode(self, rendered: str) -> list[int]:
        if MARK not in rendered:
            return self.tokenizer.encode_template(rendered)

        def encode_plain(segment: str) -> list[int]:
            return self.tokenizer.encode(self.plain(segment))

        return encode_around_special(rendered, self.tokenizer.special, self._pattern, encode_plain)

    def encode_batch(self, rendered: Sequence[str]) -> list[list[int]]:
        """`encode` of each rendered text."""
        alone = [MARK in text or (self.images is not None and IMAGE_MARK in text) for text in rendered]
        texts = [text for text, is_alone in zip(rendered, alone, strict=True) if not is_alone]
        whole = iter(self.tokenizer.encode_template_batch(texts))
        return [self.encode(text) if is_alone else next(whole) for text, is_alone in zip(rendered, alone, strict=True)]

    def encode_following(self, pairs: Iterable[tuple[str, str]]) -> list[list[int]]:
        """For each (before, text): ids of `text` to append to the ids of `before`. They are the tail of the ids of
        `before + text`. If a token would span the boundary they are the ids of `text` alone, because a policy too can
        only append tokens to its prompt.
        """
        tails = [(self._from_last_special(before), text) for before, text in pairs]
        prefixes = self.encode_batch([tail for tail, _ in tails])
        wholes = self.encode_batch([tail + text for tail, text in tails])
        return [
            whole[len(prefix) :] if whole[: len(prefix)] == prefix else self.encode(text)
            for (_, text), prefix, whole in zip(tails, prefixes, wholes, strict=True)
        ]

    def _from_last_special(self, rendered: str) -> str:
        """The suffix that can affect the tokens after it: it starts at the last special token, which no token spans."""
        start = max((match.start() for match in self._pattern.finditer(rendered)), default=0)
        return rendered[start:]


def load_template(
    value: str | None,
    tokenizer: Tokenizer,
    flag: str = "--chat-template",
    options: TemplateOptions = NO_OPTIONS,
    images: Images | None = None,
) -> ChatTemplate | None:
    """The template that `--chat-template` selects: None, "tokenizer" (the tokenizer's own) or a Jinja file's path."""
    if value is None:
        return None
    if value == "tokenizer":
        if not tokenizer.template:
            raise UsageError(f"{flag} tokenizer: the tokenizer has no chat template; give a Jinja file")
        return probed(tokenizer.template, tokenizer, f"{flag} tokenizer", options, images)
    with reading(f"{flag} {value}", missing='no such file; allowed: "tokenizer" or a Jinja file'):
        source = read_text(value, MAX_BYTES)
    return probed(source, tokenizer, f"{flag} {value}", options, images)


def probed(
    source: str, tokenizer: Tokenizer, flag: str, options: TemplateOptions, images: Images | None = None
) -> ChatTemplate:
    """The template, after a child process has rendered a message with it in bounded time and memory."""

    def render():
        ChatTemplate(source, tokenizer, flag, options).render(
            [{"role": "user", "content": "a"}], add_generation_prompt=True
        )

    if not plain_files.ends_in_child(render):
        raise UsageError(f"{flag}: the template takes more than {plain_files.child_limits()}, for one message")
    return ChatTemplate(source, tokenizer, flag, options, images)


def _with_aliases(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its thoughts under the name that gpt-oss's template reads, too, as transformers has them. That
    template fails on a message with calls, a content and thoughts.
    """
    thoughts = message.get("reasoning_content")
    has_both = "tool_calls" in message and message.get("content")
    return message if thoughts is None or has_both else {"thinking": thoughts, **message}


class _Dict:
    """`dict` in a template: without the type itself, whose attributes lead out of the sandbox."""

    def __call__(self, entries=(), /, **more):
        return dict(entries, **more)

    def fromkeys(self, keys, value=None, /):
        return dict.fromkeys(keys, value)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` in a template, without names that lead out of the sandbox."""

    def __init__(*args, **kwargs):  # `self` may be a name in the template
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_public(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name, value):
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: str):
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no place for {name!r}")


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
