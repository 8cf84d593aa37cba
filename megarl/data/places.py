"""Texts with named places, {question}, which are filled once and never evaluated; `--teacher-context-template`.

What fills a place stays text: the name of a place inside it is not filled, and no special token arises from it, since
the whole is encoded as a text.
"""

import dataclasses
import re
from collections.abc import Mapping

from megarl import bundled
from megarl.data.messages import Message, content_of
from megarl.data.prompt import Prompt
from megarl.errors import UsageError
from megarl.plain_files import read_text, reading
from megarl.plain_values import whole_unicode

PLACE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


def names_in(text: str) -> list[str]:
    """The names of the places in a text, in their order."""
    return PLACE.findall(text)


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with its places filled; KeyError for a place without a value."""
    return PLACE.sub(lambda place: values[place[1]], text)


FLAG = "--teacher-context-template"
_PLACES = {"question", "response"}


def with_response(template: str, prompt: Prompt, response: str) -> list[Message]:
    """The prompt's messages with the response before the question, which is the user's last message. `template`: a text
    with the places {question} and {response}.
    """
    messages = list(prompt.conversation)
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    at = users[-1] if users else len(messages) - 1
    values = {"question": content_of(messages[at]), "response": whole_unicode(response)}
    messages[at] = {**messages[at], "content": filled(template, values)}
    return messages


def for_teacher(prompt: Prompt) -> Prompt:
    """The prompt that a teacher reads: `teacher_prompt`, if the line has one."""
    return prompt if prompt.teacher_prompt is None else dataclasses.replace(prompt, prompt=prompt.teacher_prompt)


def read_context_template(path: str) -> str:
    """Reads the file; the ends of its last lines do not count. UsageError unless it has just the two places."""
    where = f"{FLAG} {path}"
    with reading(where):
        text = read_text(bundled.find(path)).rstrip("\n")
    found = set(names_in(text))
    if found != _PLACES:
        names = ", ".join(f"{{{name}}}" for name in sorted(found)) or "none"
        raise UsageError(f"{where}: the places must be {{question}} and {{response}}; it has {names}")
    return text
