"""One prompt of a file."""

import json
from dataclasses import dataclass, field
from typing import Any

from megarl.data.messages import Message, MessageKey, conversation_of, key_of, text_of


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
    column_names: dict[str, str] | None = field(default=None, compare=False)  # in its file, by field

    @property
    def key(self) -> str | tuple[MessageKey, ...]:
        """The prompt as a hashable value: its text, or its messages (`messages.key_of`)."""
        return self.prompt if isinstance(self.prompt, str) else key_of(self.prompt)

    @property
    def tools_key(self) -> str | None:
        """The tools as a hashable value."""
        return None if self.tools is None else json.dumps(self.tools, ensure_ascii=False)

    @property
    def columns(self) -> dict[str, Any]:
        """What a reward may read of the row, by the names of its file: metadata, and answer, task and tools; the prompt
        is there as `prompt`, too."""
        fields = {"prompt": self.prompt, "answer": self.answer, "task": self.task, "tools": self.tools}
        names = self.column_names or {}
        named = {names.get(name, name): value for name, value in fields.items() if value is not None}
        inner = [name for name in named if "." in name]  # the outer column is in the metadata
        columns = {name: value for name, value in named.items() if name not in inner}
        return {"prompt": self.prompt, **columns, **(self.metadata or {})}

    @property
    def conversation(self) -> list[Message]:
        """The prompt as messages; a string is one user message."""
        return conversation_of(self.key)

    @property
    def text(self) -> str:
        """The prompt as readable text, for samples and logs."""
        return text_of(self.conversation)
