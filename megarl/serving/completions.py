"""/v1/completions: texts or tokens to texts, with log-probs and with the prompt's own (echo)."""

import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, Response

from megarl.serving import sampling
from megarl.serving.context import ServingContext
from megarl.serving.dispatch import News
from megarl.serving.errors import invalid
from megarl.serving.progress import AnswerProgress, AnswerText, fingerprint
from megarl.serving.schemas import MOST_PROMPTS, CompletionRequest
from megarl.serving.streams import Parts, start_stream
from megarl.serving.text import Vocabulary

LOWEST = -9999.0  # in place of minus infinity, which JSON lacks


def finite(logprob: float | None) -> float | None:
    """A log-prob that JSON can hold."""
    return logprob if logprob is None or logprob > LOWEST else LOWEST


async def complete(context: ServingContext, request: CompletionRequest) -> Response:
    """Answers one request; RequestError if it is wrong or cannot run."""
    context.check_model(request.model)
    prompts = await _prompts(context, request)
    run = CompletionRun(context, request, prompts)
    if request.stream:
        return await start_stream(run.chunks(), context.config.request_timeout)
    return JSONResponse(await run.whole())


async def _prompts(context: ServingContext, request: CompletionRequest) -> list[list[int]]:
    """The token ids of each prompt."""
    given: Any = request.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)) or not given:
        given = [given]
    prompts = [
        await context.encode_text(each, request.add_special_tokens) if isinstance(each, str) else each for each in given
    ]
    for prompt in prompts:
        context.check_prompt(prompt, "prompt")
    return prompts


class CompletionRun:
    """One request, and the parts of its answer: choice number `prompt * n + choice`."""

    def __init__(self, context: ServingContext, request: CompletionRequest, prompts: Sequence[list[int]]):
        self._context, self._request, self._prompts = context, request, prompts
        self._count = sampling.choices(context, request)
        self._rules = sampling.stop_rules(context, request)
        self._generates = request.max_tokens != 0
        self._echoes, self._wants_logprobs = bool(request.echo), request.logprobs is not None
        if len(prompts) * self._count > MOST_PROMPTS:
            raise invalid(f"prompts times n: at most {MOST_PROMPTS} answers are allowed", "n")
        if not self._generates and not self._echoes:
            raise invalid("max_tokens 0: needs echo", "max_tokens")
        sampling.check_top_logprobs(context, request.logprobs or 0, "logprobs")
        self._frames = self._make_frames()
        self._id, self._created = f"cmpl-{secrets.token_hex(16)}", int(time.time())
        self._fingerprint: str | None = None
        self._generated = 0

    def _make_frames(self) -> list[dict[str, Any]]:
        """Frames of all choices, then those that score the prompts."""
        context, request, frames = self._context, self._request, []
        top = request.logprobs or 0
        keys = sampling.stream_keys(request.seed, len(self._prompts), self._count)
        for number, prompt in enumerate(self._prompts):
            length = context.response_length(prompt, request.max_tokens)
            for choice in range(self._count if self._generates else 0):
                key = keys[number * self._count + choice]
                frames.append(sampling.generate_frame(context, request, prompt, length, key, top))
        self._scored_from = len(frames)
        if self._echoes and self._wants_logprobs:
            score = {"type": "score", "temperature": sampling.temperature(request), "top_logprobs": top}
            frames += [{**score, "tokens": prompt} for prompt in self._prompts]
        return frames

    async def whole(self) -> dict[str, Any]:
        """The answer in one object."""
        merged: dict[int, dict[str, Any]] = {}
        async with aclosing(self.parts()) as parts:
            async for part in parts:
                _merge(merged.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": None}), part)
        answer = self._envelope([merged[index] for index in sorted(merged)])
        return {**answer, "usage": self._usage}

    async def chunks(self) -> Parts:
        """The objects of the stream."""
        with_usage = self._request.stream_options is not None and self._request.stream_options.include_usage
        async with aclosing(self.parts()) as parts:
            async for part in parts:
                chunk = self._envelope([part])
                yield {**chunk, "usage": None} if with_usage else chunk
        if with_usage:
            yield {**self._envelope([]), "usage": self._usage}

    async def parts(self) -> Parts:
        """Parts of choices as they come; those of one choice, joined, are the choice."""
        texts = [AnswerText(self._context.vocabulary, self._rules) for _ in range(len(self._prompts) * self._count)]
        scores = self._scored_from < len(self._frames)
        late: dict[int, list[AnswerProgress]] = {}  # of choices whose prompt has no scores yet
        with self._context.submission(self._frames, self._request.prompt_cache_key or self._request.user) as running:
            for index, text in enumerate(texts if self._echoes else ()):
                echo = text.prompt(self._prompts[index // self._count])
                echo.finish = None if self._generates else "length"
                if scores:
                    late[index] = [echo]
                else:
                    yield self._part(index, echo)
            async for number, news in running.news():
                if news.kind == "scores":
                    for part in self._scored(number - self._scored_from, news, late):
                        yield part
                    continue
                progress = texts[number].feed(news)
                self._generated += len(progress.tokens)
                if progress.finish is not None:
                    running.end(number)
                if number in late:
                    late[number].append(progress)
                elif progress.text or progress.finish or (self._wants_logprobs and progress.tokens):
                    yield self._part(number, progress)

    def _scored(self, prompt: int, news: News, late: dict[int, list[AnswerProgress]]):
        """The parts of a prompt's choices that waited for its scores."""
        for index in range(prompt * self._count, (prompt + 1) * self._count):
            waiting = late.pop(index)
            waiting[0].logprobs, waiting[0].top = list(news.logprobs), news.top
            waiting[0].fingerprint = fingerprint(news)
            yield from (self._part(index, progress) for progress in waiting)

    def _part(self, index: int, progress: AnswerProgress) -> dict[str, Any]:
        self._fingerprint = progress.fingerprint or self._fingerprint
        logprobs = completion_logprobs(self._context.vocabulary, progress) if self._wants_logprobs else None
        return {
            "index": index,
            "text": progress.text,
            "logprobs": logprobs,
            "finish_reason": progress.finish,
            "stop_reason": progress.stop_reason,
        }

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        names = self._id, self._created, self._fingerprint
        return envelope(self._context, "text_completion", *names, choices)

    @property
    def _usage(self) -> dict[str, int]:
        return usage(sum(map(len, self._prompts)), self._generated)


def envelope(
    context: ServingContext, kind: str, number: str, created: int, fingerprint: str | None, choices: list[Any]
) -> dict[str, Any]:
    """What OpenAI's answers and chunks have around their choices."""
    return {
        "id": number,
        "object": kind,
        "created": created,
        "model": context.config.model_name,
        "system_fingerprint": fingerprint,
        "choices": choices,
    }


def usage(prompt: int, generated: int) -> dict[str, int]:
    """OpenAI's `usage` of numbers of tokens."""
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def completion_logprobs(vocabulary: Vocabulary, progress: AnswerProgress) -> dict[str, list[Any]]:
    """OpenAI's `logprobs` of completions; each alternatives' object has the token itself, too."""
    names = [vocabulary.token(token)[0] for token in progress.tokens]
    tops: list[dict[str, float | None] | None] = []
    for number, (name, logprob) in enumerate(zip(names, progress.logprobs, strict=True)):
        listed = progress.top[number] if progress.top else None
        top: dict[str, float | None] = {}
        for token, value in listed or ():
            top.setdefault(vocabulary.token(token)[0], finite(value))
        if logprob is not None:
            top.setdefault(name, finite(logprob))
        tops.append(top if logprob is not None else None)
    logprobs = [finite(each) for each in progress.logprobs]
    return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": progress.offsets}


def _merge(choice: dict[str, Any], part: dict[str, Any]):
    """Appends a part to a choice."""
    choice["text"] += part["text"]
    if part["logprobs"] is not None:
        choice["logprobs"] = choice["logprobs"] or {name: [] for name in part["logprobs"]}
        for name, values in part["logprobs"].items():
            choice["logprobs"][name] += values
    choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part["stop_reason"]
