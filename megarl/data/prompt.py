"""One prompt of a file: its fields, and the checks of a line, the same for every file format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.data.images.names import ImageRef, readable, shown
from megarl.data.messages import (
    Message,
    MessageKey,
    content_of,
    conversation_of,
    key_of,
    message_error,
    text_of,
    tools_error,
)
from megarl.errors import UsageError

# What prompts are read for; evaluation reads them as reinforcement learning. LABELLED: single responses, or pairs.
RL, SFT, REWARD, LABELLED = "rl", "sft", "reward", "labelled"
MAX_MARGIN = 1e9  # more is a mistake; a whole number may be too large for a float
FIELD_TYPES: dict[str, tuple[Any, str]] = {
    "prompt": (str | list, "a string or a list of messages"),
    "answer": (str, "a string"),
    "task": (str, "a string"),
    "metadata": (dict, "an object"),
    "response": (str, "a string"),
    "messages": (list, "a list of messages"),
    "tools": (list, "a list of tools"),
    "chosen": (str, "a string"),
    "rejected": (str, "a string"),
    "margin": (int | float, "a number"),
    "environment": (str, "a string"),
    "desirable": (bool, "true or false"),
    "teacher_prompt": (str | list, "a string or a list of messages"),
    "teacher": (str, "a string"),
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
    tools: list[dict[str, Any]] | None = None
    chosen: str | None = None
    rejected: str | None = None
    margin: float | None = None
    desirable: bool | None = None  # whether `response` is
    environment: str | None = None
    teacher_prompt: str | list[Message] | None = None  # what a teacher reads instead of `prompt`
    teacher: str | None = None  # the name of its teacher
    images: tuple[ImageRef, ...] = ()  # whose marks are in its texts
    column_names: dict[str, str] | None = field(default=None, compare=False)  # in its file, by field

    @property
    def key(self) -> str | tuple[MessageKey, ...]:
        """The prompt as a hashable value: its text, or its messages (`messages.key_of`). Texts with other images differ
        in their marks."""
        return self.prompt if isinstance(self.prompt, str) else key_of(self.prompt)

    @property
    def tools_key(self) -> str | None:
        """The tools as a hashable value."""
        return None if self.tools is None else json.dumps(self.tools, ensure_ascii=False)

    @property
    def columns(self) -> dict[str, Any]:
        """What a reward may read of the row, by the names of its file: metadata, and answer, task and tools; the prompt
        is there as `prompt`, too."""
        prompt = shown(self.prompt) if self.images else self.prompt
        fields = {"prompt": prompt, "answer": self.answer, "task": self.task, "tools": self.tools}
        names = self.column_names or {}
        named = {names.get(name, name): value for name, value in fields.items() if value is not None}
        inner = [name for name in named if "." in name]  # the outer column is in the metadata
        columns = {name: value for name, value in named.items() if name not in inner}
        return {"prompt": prompt, **columns, **(self.metadata or {})}

    @property
    def conversation(self) -> list[Message]:
        """The prompt as messages; a string is one user message."""
        return conversation_of(self.key)

    @property
    def text(self) -> str:
        """The prompt as readable text, for samples and logs."""
        return readable(self.marked_text)

    @property
    def marked_text(self) -> str:
        """The same with the marks of its images, for a model that reads them."""
        return text_of(self.conversation)


def parse_line(line: str, where: str) -> dict[str, Any]:
    """The JSON object on a line; UsageError, which begins with `where`, if it is none."""
    if not line.strip():
        raise UsageError(f"{where}: blank line between prompts; expected one JSON object per line")
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: malformed JSON: {json_problem(error)} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: malformed JSON: {error}") from None
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: expected a JSON object, not {type(entry).__name__}")
    return entry


def json_problem(error: json.JSONDecodeError) -> str:
    """What is wrong, in words; of a comma with nothing after it Python's own depend on its version."""
    before, after = error.doc[: error.pos].rstrip()[-1:], error.doc[error.pos :]
    following = after.lstrip(",").lstrip()[:1]
    if (before == "," or after[:1] == ",") and following in ("}", "]"):
        return f"a comma before {following}; remove it"
    if after.strip() == ",":
        return "a comma after the object; remove it"
    return error.msg


def check_line(line: str, where: str):
    """UsageError unless the line is a prompt in megarl's own fields."""
    entry = parse_line(line, where)
    unknown = sorted(set(entry) - set(FIELD_TYPES))
    if unknown:
        raise UsageError(
            f"{where}: unknown field {unknown[0]!r}; allowed: {', '.join(FIELD_TYPES)} "
            "(anything else belongs inside metadata; with --prompt-column it is taken as metadata)"
        )
    check_fields(present_fields(entry), where)


def present_fields(entry: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line; a null means that the field is absent."""
    return {name: value for name, value in entry.items() if value is not None}


def check_fields(fields: dict[str, Any], where: str, columns: Mapping[str, str] | None = None):
    """UsageError unless the fields, none of them null, are a prompt. `columns`: what the file calls each field."""
    columns = columns or {}
    for name, value in fields.items():
        _check_field(name, value, where, columns.get(name, name))
    if "messages" in fields:
        _check_conversation(fields, where)
    elif "prompt" not in fields:
        raise UsageError(f"{where}: {columns.get('prompt', 'prompt')} is missing")
    for name in ("prompt", "teacher_prompt"):
        if name in fields:
            _check_prompt(name, fields[name], where, columns.get(name, name))


def _check_prompt(name: str, prompt: str | list[Message], where: str, column: str) -> None:
    if not contents(prompt).strip():
        raise UsageError(f"{where}: {column} is empty")
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise UsageError(f"{where}: the {name}'s last message must not be the assistant's, who answers it")


def _check_conversation(fields: dict[str, Any], where: str) -> None:
    for name in ("prompt", "response", "answer", "chosen", "rejected", "margin"):
        if name in fields:
            raise UsageError(f"{where}: both messages and {name}; messages hold the whole conversation")
    if all(message["role"] != "assistant" for message in fields["messages"]):
        raise UsageError(f"{where}: messages hold no message of the assistant, so nothing to train on")


def contents(value: str | list[Message]) -> str:
    """The text of a prompt, without roles."""
    return value if isinstance(value, str) else "".join(map(content_of, value))


def _check_field(name: str, value: Any, where: str, column: str) -> None:
    field_type, type_name = FIELD_TYPES[name]
    # bool is a subclass of int in Python.
    if not isinstance(value, field_type) or (isinstance(value, bool) and field_type is not bool):
        raise UsageError(f"{where}: {column} must be {type_name}, not {type(value).__name__}")
    if isinstance(value, list) and (problem := (tools_error if name == "tools" else message_error)(value)):
        raise UsageError(f"{where}: {column}: {problem}")
    if name == "margin" and not 0 <= value <= MAX_MARGIN:
        raise UsageError(f"{where}: {column} is {str(value)[:40]}; it must be a number from 0 to {MAX_MARGIN:g}")
    if isinstance(value, str | list):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError(f"{where}: {column} holds half of a surrogate pair (\\ud800-\\udfff)") from None
