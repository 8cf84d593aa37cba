"""The file of `--teacher-context-template`: how a response is put before the question that a teacher reads."""

import dataclasses
from typing import NamedTuple

from megarl import bundled
from megarl.data.messages import Message, content_of
from megarl.data.places import filled, names_in
from megarl.data.prompt import Prompt
from megarl.errors import UsageError
from megarl.plain_files import read_text, reading
from megarl.plain_values import whole_unicode

FLAG = "--teacher-context-template"
PLACES = ("question", "response")


class ContextTemplate(NamedTuple):
    """A text with the places {question} and {response}."""

    text: str

    def messages(self, prompt: Prompt, response: str) -> list[Message]:
        """The prompt's messages with the response before the question, which is the user's last message."""
        messages = list(prompt.conversation)
        users = [number for number, message in enumerate(messages) if message["role"] == "user"]
        at = users[-1] if users else len(messages) - 1
        values = {"question": content_of(messages[at]), "response": whole_unicode(response)}
        messages[at] = {**messages[at], "content": filled(self.text, values)}
        return messages


def for_teacher(prompt: Prompt) -> Prompt:
    """The prompt that a teacher reads: `teacher_prompt`, if the line has one."""
    return prompt if prompt.teacher_prompt is None else dataclasses.replace(prompt, prompt=prompt.teacher_prompt)


def read_context_template(path: str) -> ContextTemplate:
    """Reads the file; the ends of its last lines do not count. UsageError unless it has just the two places."""
    where = f"{FLAG} {path}"
    with reading(where):
        text = read_text(bundled.find(path)).rstrip("\n")
    found = set(names_in(text))
    if found != {*PLACES}:
        names = ", ".join(f"{{{name}}}" for name in sorted(found)) or "none"
        raise UsageError(f"{where}: the places must be {{question}} and {{response}}; it has {names}")
    return ContextTemplate(text)
