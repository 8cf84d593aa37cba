"""Prompt files: JSON lines, fully checked before any work starts.

One object per line: `prompt` (non-empty string, or a list of messages with `role` and `content`) and, optionally,
`answer` (string, the reference answer), `task` (string), `metadata` (object, input of verifiers), `response` (string,
target of supervised training), `chosen` and `rejected` (strings, the better and the worse response) with a `margin`
(number >= 0). For supervised training `messages` (a whole conversation) may replace `prompt`.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator

import numpy as np

from megarl.data import node_files
from megarl.data.messages import Message, conversation_of, message_error, text_of
from megarl.data.ragged import Ragged
from megarl.errors import UsageError

if TYPE_CHECKING:
    from megarl.data.conversations import Encoder

_FIELD_TYPES: dict[str, tuple[Any, str]] = {
    "prompt": (str | list, "a string or a list of messages"),
    "answer": (str, "a string"),
    "task": (str, "a string"),
    "metadata": (dict, "an object"),
    "response": (str, "a string"),
    "messages": (list, "a list of messages"),
    "chosen": (str, "a string"),
    "rejected": (str, "a string"),
    "margin": (int | float, "a number"),
}


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file; `index` counts the prompts from 0. `prompt` is "" in a line with `messages`."""

    index: int
    prompt: str | list[Message] = ""
    answer: str | None = None
    task: str | None = None
    metadata: dict[str, Any] | None = None
    response: str | None = None
    messages: list[Message] | None = None
    chosen: str | None = None
    rejected: str | None = None
    margin: float | None = None

    @property
    def key(self) -> str | tuple[tuple[str, str], ...]:
        """The prompt as a hashable value: its text, or (role, content) pairs."""
        if isinstance(self.prompt, str):
            return self.prompt
        return tuple((message["role"], message["content"]) for message in self.prompt)

    @property
    def conversation(self) -> list[Message]:
        """The prompt as messages; a string is one user message."""
        return conversation_of(self.key)

    @property
    def text(self) -> str:
        """The prompt as readable text, for samples and logs."""
        return text_of(self.conversation)


class PromptSet:
    """The prompts of one file, in file order. It holds the file's text, and each access reads one line of it."""

    def __init__(self, lines: Ragged, path: str, flag: str):
        """`lines`: the UTF-8 bytes of each line, all valid."""
        self._lines = lines
        self.path = path
        self.flag = flag

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Prompt:
        index = range(len(self))[index]
        return Prompt(index=index, **_fields(json.loads(self._lines.view(index).tobytes())))

    def __iter__(self) -> Iterator[Prompt]:
        return (self[index] for index in range(len(self)))

    def where(self, index: int) -> str:
        """`--prompts data/train.jsonl:17`, the start of an error message about prompt `index`."""
        return f"{self.flag} {self.path}:{index + 1}"

    def encode(self, encoder: Encoder, max_prompt_length: int | None = None) -> Ragged:
        """Tokens of every prompt as the policy reads it; UsageError if one has none or more than `max_prompt_length`.

        One rank of a node encodes them for all. None: any length, to check that `encoder` accepts every prompt.
        """

        def encoded() -> dict[str, np.ndarray]:
            return Ragged.of_rows(self._encoded(prompt, encoder, max_prompt_length) for prompt in self).arrays()

        return Ragged.of_arrays(self.on_node(encoded, "tokens", encoder, max_prompt_length))

    def on_node(
        self, compute: Callable[[], dict[str, np.ndarray]], name: str, encoder: Encoder, *options
    ) -> dict[str, np.ndarray]:
        """Arrays that one rank of a node computes from this file with an encoder (`node_files.arrays`)."""

        def key() -> tuple:
            return name, self.where(0), node_files.identity(self.path), encoder.fingerprint, options

        return node_files.arrays(key, compute)

    def _encoded(self, prompt: Prompt, encoder: Encoder, max_prompt_length: int | None) -> list[int]:
        where = self.where(prompt.index)
        if prompt.messages is not None:
            raise UsageError(f"{where}: prompt is missing; messages are for supervised training")
        try:
            return prompt_tokens(prompt, encoder, max_prompt_length)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None


def prompt_tokens(prompt: Prompt, encoder: Encoder, max_prompt_length: int | None = None) -> list[int]:
    """Tokens of one prompt; UsageError if it has none or more than `max_prompt_length` (None: no limit)."""
    ids = encoder.prompt(prompt)
    if not ids:
        raise UsageError("the prompt becomes no token")
    if max_prompt_length is not None and len(ids) > max_prompt_length:
        raise UsageError(f"the prompt has {len(ids)} tokens; --max-prompt-length allows {max_prompt_length}")
    return ids


def load_prompts(path: str, flag: str = "--prompts") -> PromptSet:
    """Reads and checks every line of a prompt file; `flag` names its option in error messages.

    One rank of a node does it for all. Blank lines may follow the last prompt. Raises UsageError with the line number
    for the first bad line, and for a file that is missing, not UTF-8, or without prompts.
    """

    def key() -> tuple:
        return "prompts", flag, path, node_files.identity(path)

    lines = node_files.arrays(key, lambda: _read_lines(path, flag).arrays())
    return PromptSet(Ragged.of_arrays(lines), path, flag)


def _read_lines(path: str, flag: str) -> Ragged:
    """The checked lines of a prompt file."""
    raw = _read_text(path, flag)
    text = np.frombuffer(raw, np.uint8)
    breaks = np.flatnonzero(text == ord("\n"))  # in UTF-8 no other character contains this byte
    # One line, one prompt: line number = index + 1, which `PromptSet.where` relies on.
    lines = Ragged(text, np.concatenate([[0], breaks + 1, [len(text)]]).astype(np.int64))
    count = len(lines)
    while count and not lines.view(count - 1).tobytes().decode().strip():
        count -= 1
    if not count:
        raise UsageError(f"{flag} {path}: the file holds no prompt")
    offsets = lines.offsets[: count + 1]
    for i in range(count):
        line = lines.view(i).tobytes().decode()
        _check_line(line.removesuffix("\n"), f"{flag} {path}:{i + 1}")
    return Ragged(text[: offsets[-1]], offsets)


def _read_text(path: str, flag: str) -> bytes:
    """The bytes of a UTF-8 file without its byte order mark."""
    try:
        raw = Path(path).read_bytes()
        raw.decode("utf-8-sig")
        return raw.removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        raise UsageError(f"{flag} {path}: no such file") from None
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} {path}: not UTF-8 (byte {error.start}); convert the file to UTF-8") from None


def _fields(entry: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line; a null means that the field is absent."""
    return {name: value for name, value in entry.items() if value is not None}


def _check_line(line: str, where: str):
    """UsageError unless the line is a prompt."""
    if not line.strip():
        raise UsageError(f"{where}: blank line between prompts; expected one JSON object per line")
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: malformed JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: malformed JSON: {error}") from None
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: expected a JSON object, not {type(entry).__name__}")
    unknown = sorted(set(entry) - set(_FIELD_TYPES))
    if unknown:
        raise UsageError(
            f"{where}: unknown field {unknown[0]!r}; allowed: {', '.join(_FIELD_TYPES)} "
            "(anything else belongs inside metadata)"
        )
    fields = _fields(entry)
    for name, value in fields.items():
        _check_field(name, value, where)
    if "messages" in fields:
        _check_conversation(fields, where)
    elif "prompt" not in fields:
        raise UsageError(f"{where}: prompt is missing")
    elif not _contents(fields["prompt"]).strip():
        raise UsageError(f"{where}: prompt is empty")
    elif isinstance(fields["prompt"], list) and fields["prompt"][-1]["role"] == "assistant":
        raise UsageError(f"{where}: the prompt's last message must not be the assistant's, who answers it")


def _check_conversation(fields: dict[str, Any], where: str) -> None:
    """A line with a whole conversation must have no prompt and no response."""
    for name in ("prompt", "response", "answer", "chosen", "rejected", "margin"):
        if name in fields:
            raise UsageError(f"{where}: both messages and {name}; messages hold the whole conversation")
    if all(message["role"] != "assistant" for message in fields["messages"]):
        raise UsageError(f"{where}: messages hold no message of the assistant, so nothing to train on")


def _contents(value: str | list[Message]) -> str:
    return value if isinstance(value, str) else "".join(message["content"] for message in value)


def _check_field(name: str, value: Any, where: str) -> None:
    field_type, type_name = _FIELD_TYPES[name]
    # bool is a subclass of int in Python.
    if not isinstance(value, field_type) or isinstance(value, bool):
        raise UsageError(f"{where}: {name} must be {type_name}, not {type(value).__name__}")
    if isinstance(value, list) and (problem := message_error(value)):
        raise UsageError(f"{where}: {name}: {problem}")
    if name == "margin" and not (math.isfinite(value) and value >= 0):
        raise UsageError(f"{where}: margin is {value}; it must be a finite number of at least 0")
    if isinstance(value, str | list):
        try:
            _contents(value).encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError(f"{where}: {name} holds half of a surrogate pair (\\ud800-\\udfff)") from None
