"""/v1/chat/completions: messages to messages through the server's chat template, with tool calls."""

import secrets
import time
from contextlib import aclosing
from typing import Any

from starlette.responses import JSONResponse, Response

from megarl.serving import sampling
from megarl.serving.completions import envelope, finite, usage
from megarl.serving.context import ServingContext
from megarl.serving.conversation import template_messages, template_tools
from megarl.serving.errors import invalid
from megarl.serving.progress import AnswerProgress, AnswerText
from megarl.serving.schemas import ChatCompletionRequest
from megarl.serving.streams import Parts, start_stream
from megarl.serving.text import Vocabulary
from megarl.serving.tool_calls import ToolCallParser


async def chat(context: ServingContext, request: ChatCompletionRequest) -> Response:
    """Answers one request; RequestError if it is wrong or cannot run."""
    context.check_model(request.model)
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs: needs logprobs true", "top_logprobs")
    tools = template_tools(request.tools) if request.tools and request.tool_choice != "none" else None
    prompt = await context.encode_chat(template_messages(request.messages), tools)
    context.check_prompt(prompt, "messages")
    run = ChatRun(context, request, prompt)
    if request.stream:
        return await start_stream(run.chunks(), context.config.request_timeout)
    return JSONResponse(await run.whole())


class ChatRun:
    """One request, and the parts of its answer."""

    def __init__(self, context: ServingContext, request: ChatCompletionRequest, prompt: list[int]):
        self._context, self._request, self._prompt = context, request, prompt
        count = sampling.choices(context, request)
        self._rules = sampling.stop_rules(context, request)
        top = request.top_logprobs or 0
        sampling.check_top_logprobs(context, top, "top_logprobs")
        if request.max_completion_tokens is not None:
            length = context.response_length(prompt, request.max_completion_tokens, "max_completion_tokens")
        else:
            length = context.response_length(prompt, request.max_tokens)
        self._frames = [
            sampling.generate_frame(context, request, prompt, length, key, top)
            for key in sampling.stream_keys(request.seed, 1, count)
        ]
        self._parses = bool(request.tools) and request.tool_choice != "none"
        self._id, self._created = f"chatcmpl-{secrets.token_hex(16)}", int(time.time())
        self._fingerprint: str | None = None
        self._generated = 0

    async def whole(self) -> dict[str, Any]:
        """The answer in one object."""
        merged = [_empty_choice(index, self._request.logprobs) for index in range(len(self._frames))]
        async with aclosing(self.parts()) as parts:
            async for part in parts:
                _merge(merged[part["index"]], part)
        for choice in merged:
            message = choice["message"]
            if "tool_calls" in message and not message["content"]:
                message["content"] = None
        return {**self._envelope("chat.completion", merged), "usage": self._usage}

    async def chunks(self) -> Parts:
        """The objects of the stream."""
        with_usage = self._request.stream_options is not None and self._request.stream_options.include_usage
        async with aclosing(self.parts()) as parts:
            async for part in parts:
                chunk = self._envelope("chat.completion.chunk", [part])
                yield {**chunk, "usage": None} if with_usage else chunk
        if with_usage:
            yield {**self._envelope("chat.completion.chunk", []), "usage": self._usage}

    async def parts(self) -> Parts:
        """Parts of choices as they come, each with a `delta`; the first of a choice has its role."""
        vocabulary, count = self._context.vocabulary, len(self._frames)
        texts = [AnswerText(vocabulary, self._rules) for _ in range(count)]
        parsers = [ToolCallParser() if self._parses else None for _ in range(count)]
        begun: set[int] = set()
        with self._context.submission(self._frames, self._request.prompt_cache_key or self._request.user) as running:
            async for index, news in running.news():
                progress = texts[index].feed(news)
                self._generated += len(progress.tokens)
                self._fingerprint = progress.fingerprint
                if progress.finish is not None:
                    running.end(index)
                part = self._part(index, progress, parsers[index])
                if index not in begun:
                    begun.add(index)
                    part["delta"] = {"role": "assistant", "content": "", **part["delta"]}
                if part["delta"] or part["finish_reason"] or part["logprobs"]:
                    yield part

    def _part(self, index: int, progress: AnswerProgress, parser: ToolCallParser | None) -> dict[str, Any]:
        text, calls, first = progress.text, [], 0
        finish = progress.finish
        if parser is not None:
            first = parser.count
            text, calls = parser.feed(text)
            if finish is not None:
                rest, more = parser.finish()
                text, calls = text + rest, calls + more
            if finish == "stop" and parser.count:
                finish = "tool_calls"
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls, start=first)]
        return {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(self._context.vocabulary, progress) if self._request.logprobs else None,
            "finish_reason": finish,
            "stop_reason": progress.stop_reason,
        }

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return envelope(self._context, kind, self._id, self._created, self._fingerprint, choices)

    @property
    def _usage(self) -> dict[str, int]:
        return usage(len(self._prompt), self._generated)


def chat_logprobs(vocabulary: Vocabulary, progress: AnswerProgress) -> dict[str, Any] | None:
    """OpenAI's `logprobs` of chat answers; None without tokens."""

    def described(token: int, logprob: float | None) -> dict[str, Any]:
        text, data = vocabulary.token(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

    tops = progress.top or [()] * len(progress.tokens)
    content = [
        {**described(token, logprob), "top_logprobs": [described(*each) for each in top or ()]}
        for token, logprob, top in zip(progress.tokens, progress.logprobs, tops, strict=True)
    ]
    return {"content": content} if content else None


def _empty_choice(index: int, wants_logprobs: bool | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": "", "refusal": None}
    return {"index": index, "message": message, "logprobs": {"content": []} if wants_logprobs else None}


def _merge(choice: dict[str, Any], part: dict[str, Any]):
    """Appends a part to a choice."""
    message, delta = choice["message"], part["delta"]
    message["content"] += delta.get("content", "")
    for call in delta.get("tool_calls", ()):
        message.setdefault("tool_calls", []).append({name: call[name] for name in ("id", "type", "function")})
    if part["logprobs"] is not None:
        choice["logprobs"]["content"] += part["logprobs"]["content"]
    choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part["stop_reason"]
