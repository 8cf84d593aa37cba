"""What an environment is: the protocol that users implement, and the records that pass between it and the rollout.

What an environment returns is checked: its code, and texts that a policy may have shaped, are not ours. Nothing in the
text of a turn raises an exception. Images leave an observation at once (`seen_of`): marks stay in their places, so what
is kept of it is text.
"""

import asyncio
import dataclasses
import functools
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.data.images import names
from megarl.data.images.decoding import MAX_BYTES, decode_confined, is_picture, png_of, size_of, url_of
from megarl.data.images.names import MARK, ImageRef, sha256_of
from megarl.data.messages import content_of, message_error
from megarl.errors import UsageError
from megarl.measurements import parts_of, value_of
from megarl.plain_values import whole_unicode
from megarl.tool_formats import FORMATS
from megarl.tool_formats.reader import CONTENT, REASONING, Said, TurnParts, joined
from megarl.tool_formats.tool_format import TextParser, ToolFormat
from megarl.tool_formats.written_calls import WrittenCall, attempt
from megarl.tool_formats.written_calls import checked as checked_call
from megarl.user_results import is_async, shown

Message = dict[str, Any]  # role and content, a text or parts; of a tool also tool_call_id and name
ImageBytes = dict[str, bytes]  # by the images' digests

ROLES = ("user", "system", "tool")
MAX_MESSAGES_LENGTH = 1 << 20  # characters, of all messages of an observation
_REPLACED = "\ufffd"  # for marks in texts
_FIELDS = {"role", "content", "tool_call_id", "name"}


@dataclass(frozen=True)
class Task:
    """What an episode begins with: a line of the prompts, and seeds. Texts of messages have the names of images; an
    agent's messages have the images themselves, in parts as it sends them.

    `seed` is the same for all samples of a group, so that their episodes begin alike; `sample_seed` differs between
    them. Both depend on the run's seed, the step and the line, never on the layout.
    """

    messages: list[Message]  # of the prompt; a prompt in plain text is one user message
    answer: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    task: str | None = None
    seed: int = 0
    sample_seed: int = 0
    images: tuple[dict[str, Any], ...] = ()  # of the messages: `bytes`, `width` and `height` of each

    @property
    def prompt(self) -> str:
        """Text of the last message."""
        content = self.messages[-1]["content"]
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)

    def with_names(self) -> "Task":
        """The task with names in the places of marks of its images."""
        return dataclasses.replace(self, messages=names.shown(self.messages)) if self.images else self

    def with_parts(self) -> "Task":
        """The task with parts of the type `image_url` in the places of marks of its images."""
        urls = {sha256_of(image["bytes"]): url_of(image["bytes"]) for image in self.images}
        return dataclasses.replace(self, messages=[_with_parts(message, urls) for message in self.messages])


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote: a name and an object of arguments, neither of them checked."""

    id: str  # "call_0_1" is the second call of the first turn
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What the policy wrote in one turn. Every text of it is hostile input."""

    number: int  # counts the turns of the episode from 0
    text: str  # as written, without the token that ended it
    content: str  # the text without reasoning and calls
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()  # why a text that looks like a call is not valid


@dataclass(frozen=True)
class Observation:
    """What the environment answers to a turn; from `reset`, what it adds to the prompt.

    `parts` are named components of the reward, for the log. `correct`: whether the task is solved; None: it is if the
    rewards of the episode add up to at least 1.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    correct: bool | None = None
    parts: dict[str, float] = field(default_factory=dict)


class BaseEnvironment:
    """The protocol, with defaults; an environment need not be of this class. Each episode gets one of its own. Methods
    may be plain functions, which then run in a thread.

    `tools`: JSON schemas of the functions that the policy may call, rendered into the prompt; known after `reset`.
    `replayable`: the same task and turns give the same observations, so that an episode of a worker process that died
    can be played again; False: such an episode is left out of the training.
    """

    tools: list[dict[str, Any]] = []  # noqa: RUF012  # never changed in place
    replayable = True

    def reset(self, task: Task) -> Observation | Awaitable[Observation]:
        """Begins the episode; `reward` and `done` of the observation are not read. By default nothing is added to the
        prompt."""
        return Observation()

    def step(self, turn: Turn) -> Observation | Awaitable[Observation]:
        """Answers a turn; to be defined. An exception is a failure of the environment, not of the policy."""
        raise NotImplementedError(f"{type(self).__name__} defines no step")

    async def restore(self, task: Task, turns: list[Turn], observations: list[Observation]) -> None:
        """Brings a new environment to the state after these turns. Called instead of `reset`; by default it plays the
        turns again. `observations` are as `seen_of` gives them. RuntimeError: one differs, so the environment is not
        replayable."""
        await resolved(self.reset(task))
        for turn, before in zip(turns, observations, strict=True):
            seen, _ = await seen_of(await resolved(self.step(turn)))
            if seen != before:
                raise RuntimeError(f"{type(self).__name__}: turn {turn.number} was answered differently when replayed")

    def close(self) -> Awaitable[None] | None:
        """Frees what the episode holds: by default nothing. The episode may have ended at any point."""


async def called(function: Callable, *args, **kwargs) -> Any:
    """The result of a user's function; a plain one runs in a thread."""
    call = functools.partial(function, *args, **kwargs)
    return await call() if is_async(function) else await resolved(await asyncio.to_thread(call))


async def resolved(result):
    """The result of a method that may or may not be a coroutine."""
    return await result if isinstance(result, Awaitable) else result


def user_message(text: str) -> Message:
    """A message of the user, as which environments speak."""
    return {"role": "user", "content": text}


# -- checks of what an environment returns -----------------------------------------------------------------------------


async def seen_of(observation: Any, name: str = "") -> tuple[Observation, ImageBytes]:
    """(the observation of the environment `name`, checked and with marks for its images; these). ValueError: why it is
    none, or why an image cannot be read."""
    images: ImageBytes = {}
    if isinstance(observation, Observation) and isinstance(observation.messages, list):
        messages = observation.messages
        has_parts = any(isinstance(each, dict) and isinstance(each.get("content"), list) for each in messages)
        try:
            # Decoding takes long.
            messages = await asyncio.to_thread(marked, messages, images) if has_parts else marked(messages, images)
        except UsageError as error:
            raise ValueError(f"{name}: {error}" if name else str(error)) from None
        observation = dataclasses.replace(observation, messages=messages)
    return checked(observation, name), images


def marked(messages: list[Any], images: ImageBytes) -> list[Any]:
    """Messages whose contents are texts, with marks for their images, which are added to `images`.

    Marks that a content already has become U+FFFD: an environment may repeat what the policy has written. UsageError
    for an image that cannot be read, and for parts of another type.
    """

    def read(value: Any) -> ImageRef:
        data = image_bytes(value)
        images[sha256_of(data)] = data
        if sum(map(len, images.values())) > MAX_BYTES:
            raise UsageError(f"the images of an observation have more than {MAX_BYTES:,} bytes")
        return ImageRef(sha256_of(data), *size_of(data))

    return [_marked(message, read) for message in messages]


def _marked(message: Any, read: Callable[[Any], ImageRef]) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return {**message, "content": content.replace(MARK, _REPLACED)}
    if not isinstance(content, list):
        return message
    from megarl.data.images import forms  # it needs numbers, and most environments speak in texts

    texts = [
        {**part, "text": part["text"].replace(MARK, _REPLACED)}
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else part
        for part in content
    ]
    (found,) = forms.placed([{**message, "content": texts}], (), read)
    if isinstance(found["content"], list):
        if problem := message_error([{"role": message.get("role"), "content": texts}]):
            raise UsageError(problem)
        found["content"] = content_of(found)
    return found


_decoded: set[str] = set()  # digests of images that this process has decoded, or has made itself
_MAX_DECODED = 1 << 16


def image_bytes(value: Any) -> bytes:
    """The bytes of an image of Pillow, of bytes, or of a data: URL, also in objects as data have them. Bytes are
    decoded once, confined. UsageError: why it cannot be read."""
    inner = [each for each in value.values() if is_picture(each)] if isinstance(value, dict) else []
    if inner or is_picture(value):
        data = png_of(inner[0] if inner else value)
    else:
        from megarl.data.images import forms

        data, _ = forms.source_of(value, None)
        if sha256_of(data) not in _decoded:
            decode_confined(data)
    if len(_decoded) >= _MAX_DECODED:
        _decoded.clear()
    _decoded.add(sha256_of(data))
    return data


def _with_parts(message: Message, urls: dict[str, str]) -> Message:
    if not urls or message["role"] == "assistant" or MARK not in str(message.get("content")):
        return message
    parts: list[dict[str, Any]] = []
    for text, digest in names.pieces(message["content"]):
        known = urls.get(digest or "")
        parts.append({"type": "image_url", "image_url": {"url": known}} if known else {"type": "text", "text": text})
    return {**message, "content": parts}


def checked(observation: Any, name: str = "") -> Observation:
    """The observation of the environment `name`, with plain numbers and valid Unicode. ValueError: why it is none."""
    try:
        return _checked(observation)
    except ValueError as error:
        raise ValueError(f"{name}: {error}" if name else str(error)) from None


def _checked(observation: Any) -> Observation:
    if not isinstance(observation, Observation):
        raise ValueError(f"returned {type(observation).__name__}, not an Observation")
    reward, parts, correct = value_of("reward", observation.reward), parts_of(observation.parts), observation.correct
    if not isinstance(observation.messages, list):
        raise ValueError(f"messages are {type(observation.messages).__name__}, not a list")
    messages = [_message(message) for message in observation.messages]
    size = sum(len(json.dumps(message)) for message in messages)
    if size > MAX_MESSAGES_LENGTH:
        raise ValueError(f"the messages have {size:,} characters; allowed are {MAX_MESSAGES_LENGTH:,}")
    correct = None if correct is None else bool(correct)
    plain: dict[str, Any] = dict(messages=messages, reward=reward, done=bool(observation.done), correct=correct)
    return dataclasses.replace(observation, **plain, parts=parts)


def _message(message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not {"role", "content"} <= set(message) <= _FIELDS:
        raise ValueError("a message is an object with role, content and perhaps tool_call_id and name")
    if message["role"] not in ROLES:
        raise ValueError(f"a message has the role {shown(message['role'])}; allowed are {', '.join(ROLES)}"[:200])
    for name, value in message.items():
        if not isinstance(value, str):
            raise ValueError(f"{name} of a message is {type(value).__name__}, not text")
    return {name: whole_unicode(value) for name, value in message.items()}


# -- what the policy wrote ---------------------------------------------------------------------------------------------


HERMES = FORMATS["hermes"]


def parse_turn(
    text: str, number: int, form: ToolFormat = HERMES, tools: Sequence[dict[str, Any]] = (), marked: str | None = None
) -> Turn:
    """What the policy wrote in turn `number`.

    Its thoughts end with a mark such as `</think>`, and may begin with one, unless the template wrote that; a turn that
    begins so and does not end its thoughts is nothing else, so calls in thoughts are not made. Calls that
    `megarl.tool_formats.written_calls` does not allow are errors. `tools`: whose schemas say what an argument is where
    the format does not; `marked`: the text with the special tokens that are marks of the format; None: the same text.
    """
    text = whole_unicode(text)
    read = text if marked is None else whole_unicode(marked)
    reader = form.reader(tools)
    parts = [*reader.feed(read), *reader.finish()]
    if form.parser is None:
        found = joined(parts)
    else:
        said = [part for part in parts if isinstance(part, Said)]
        thoughts = "".join(part.text for part in said if part.kind == REASONING)
        found = _read_by_user(
            form.parser, thoughts.strip(), "".join(part.text for part in said if part.kind == CONTENT)
        )
    ids = form.call_ids(found.calls, number)
    calls = tuple(ToolCall(each, call.name, call.arguments) for each, call in zip(ids, found.calls, strict=True))
    return Turn(number, text, found.content, found.reasoning, calls, tuple(found.errors))


def _read_by_user(parser: TextParser, reasoning: str, text: str) -> TurnParts:
    try:
        content, calls, errors = parser(text)
        found = [attempt(checked_call, WrittenCall(name, arguments)) for name, arguments in calls]
        good = [call for call in found if isinstance(call, WrittenCall)]
        problems = [*map(str, errors), *(problem for problem in found if isinstance(problem, str))]
        return TurnParts(reasoning, str(content), good, problems)
    except Exception as error:  # of a plug-in that did not expect this text
        return TurnParts(reasoning, text, [], [f"{type(error).__name__}: {error}"[:200]])
