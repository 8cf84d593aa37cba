"""The answers of OpenAI's endpoints: from what a leader says to text, to parts of a stream, and to the whole answer."""

import secrets
import time
from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from megarl.data.detokenizer import Vocabulary
from megarl.serving import sampling
from megarl.serving.context import ServingContext
from megarl.serving.errors import JSONResponse
from megarl.serving.replica_messages import RequestUpdate
from megarl.serving.sampling import StopRules
from megarl.serving.schemas import OpenAIFields
from megarl.serving.stop_strings import StopStrings
from megarl.serving.streams import Parts, start_stream

MIN_LOGPROB = -9999.0  # in place of minus infinity, which JSON lacks


@dataclass
class AnswerProgress:
    """What an update adds to an answer.

    Attributes:
        text: characters that are certain now.
        tokens, logprobs, top, offsets: of each new token; `offsets` are characters of the whole text before it.
        finish: "stop", "length", "abort", or None while the answer goes on.
        stop_reason: the stop string, or the token of `stop_token_ids`, that ended it.
        fingerprint: label and policy version of the last token.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: Sequence[Any] | None = None
    offsets: list[int] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None
    fingerprint: str | None = None


class AnswerText:
    """Turns the tokens of one answer into text, and cuts it at stop strings."""

    def __init__(self, vocabulary: Vocabulary, rules: StopRules, marks: Collection[str] = ()):
        """`marks`: special tokens whose strings are part of the text."""
        self._rules = rules
        self._detokenizer = vocabulary.detokenizer(marks)
        self._stops = StopStrings(rules.strings, rules.include)
        self._length = 0

    def prompt(self, tokens: Sequence[int]) -> AnswerProgress:
        """The prompt in front of the answer, in which stop strings have no meaning."""
        progress = AnswerProgress(tokens=list(tokens))
        for token in tokens:
            progress.offsets.append(self._length)
            progress.text += self._piece(token)
        return progress

    def feed(self, update: RequestUpdate) -> AnswerProgress:
        """The progress that an update with generated tokens makes."""
        progress = AnswerProgress(finish=update.finish, fingerprint=update.fingerprint)
        for token in update.tokens:
            is_end = update.finish == "stop" and len(progress.tokens) == len(update.tokens) - 1
            progress.tokens.append(token)
            progress.offsets.append(self._length)
            if is_end and token in self._rules.tokens:
                progress.stop_reason = token
            if not is_end or self._rules.include:
                progress.text += self._stops.feed(self._piece(token))
            if self._stops.matched is not None:
                break
        if update.finish is not None and self._stops.matched is None:
            rest = self._detokenizer.finish()
            progress.text += self._stops.feed(rest) + self._stops.finish()
        if self._stops.matched is not None:
            progress.finish, progress.stop_reason = "stop", self._stops.matched
        count = len(progress.tokens)
        progress.logprobs = list(update.logprobs[:count])
        progress.top = update.top and update.top[:count]
        return progress

    def _piece(self, token: int) -> str:
        piece = self._detokenizer.feed(token)
        self._length += len(piece)
        return piece


def finite(logprob: float | None) -> float | None:
    """A log-prob that JSON can hold."""
    return logprob if logprob is None or logprob > MIN_LOGPROB else MIN_LOGPROB


class OpenAIAnswer:
    """The answer to one request: parts of its choices, which are streamed or merged."""

    kind = chunk_kind = prefix = ""  # `object` of the whole answer and of a chunk, beginning of `id`

    def __init__(self, context: ServingContext, request: OpenAIFields, prompt_tokens: int):
        """RequestError 400 for too many choices or stop strings."""
        self._context, self._prompt_tokens = context, prompt_tokens
        self._count = sampling.choices(context, request)
        self._rules = sampling.stop_rules(context, request)
        self._session = request.prompt_cache_key or request.user
        self._streams = request.stream
        self._with_usage = bool(request.stream_options and request.stream_options.include_usage)
        self._id, self._created = f"{self.prefix}-{secrets.token_hex(16)}", int(time.time())
        self._fingerprint: str | None = None
        self._generated = 0  # tokens

    def parts(self) -> Parts:
        """Parts of choices as they come; those of one choice, merged, are the choice."""
        raise NotImplementedError

    def empty_choices(self) -> list[dict[str, Any]]:
        """All choices before their first part."""
        raise NotImplementedError

    def merge(self, choice: dict[str, Any], part: dict[str, Any]):
        """Appends a part to a choice."""
        choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part["stop_reason"]

    async def response(self) -> Response:
        """The answer as the request wants it."""
        if self._streams:
            return await start_stream(self._chunks(), self._context.config.settings.request_timeout)
        choices = self.empty_choices()
        async with aclosing(self.parts()) as parts:
            async for part in parts:
                self.merge(choices[part["index"]], part)
        return JSONResponse(self._envelope(self.kind, choices) | {"usage": self._usage})

    async def _chunks(self) -> Parts:
        async with aclosing(self.parts()) as parts:
            async for part in parts:
                chunk = self._envelope(self.chunk_kind, [part])
                yield {**chunk, "usage": None} if self._with_usage else chunk
        if self._with_usage:
            yield {**self._envelope(self.chunk_kind, []), "usage": self._usage}

    def _envelope(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._context.config.model_name,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    @property
    def _usage(self) -> dict[str, int]:
        prompt, generated = self._prompt_tokens, self._generated
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
