"""/v1/chat/completions: messages to messages through the server's chat template, with tool calls."""

from typing import Any

from starlette.responses import Response

from megarl.data.detokenizer import Vocabulary
from megarl.serving import sampling
from megarl.serving.answers import AnswerProgress, AnswerText, OpenAIAnswer, finite
from megarl.serving.context import ServingContext
from megarl.serving.errors import invalid
from megarl.serving.replica_pool import Submission
from megarl.serving.schemas import ChatCompletionRequest
from megarl.serving.streams import Parts
from megarl.serving.tokenization import template_messages, template_tools
from megarl.serving.tool_calls import AnswerDelta, ToolCallParser, has_opened_thoughts


async def chat(context: ServingContext, request: ChatCompletionRequest) -> Response:
    """Answers one request; RequestError if it is wrong or cannot run."""
    context.check_model(request.model)
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs: needs logprobs true", "top_logprobs")
    may_call = bool(request.tools) and request.tool_choice != "none"
    tools = template_tools(request.tools or []) if may_call else None
    prompt = await context.encode_chat(template_messages(request.messages), tools, request.chat_template_kwargs)
    context.check_prompt(prompt, "messages")
    return await ChatAnswer(context, request, prompt, tools).response()


class ChatAnswer(OpenAIAnswer):
    """The answer to one request, after its prompt's tokens; `tools`: that it may call; None: none."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, context: ServingContext, request: ChatCompletionRequest, prompt: list[int], tools: list[dict] | None
    ):
        super().__init__(context, request, len(prompt))
        self._tools, self._wants_logprobs = tools, bool(request.logprobs)
        self._opened = has_opened_thoughts(context.form, context.vocabulary, prompt)
        top = request.top_logprobs or 0
        sampling.check_top_logprobs(context, top, "top_logprobs")
        if request.max_completion_tokens is not None:
            length = context.response_length(prompt, request.max_completion_tokens, "max_completion_tokens")
        else:
            length = context.response_length(prompt, request.max_tokens)
        self._requests = [
            sampling.generation(context, request, prompt, length, key, top)
            for key in sampling.stream_keys(request.seed, 1, self._count)
        ]

    def empty_choices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                "message": {"role": "assistant", "content": "", "refusal": None},
                "logprobs": {"content": []} if self._wants_logprobs else None,
            }
            for index in range(self._count)
        ]

    def merge(self, choice: dict[str, Any], part: dict[str, Any]):
        message, delta = choice["message"], part["delta"]
        message["content"] += delta.get("content", "")
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for call in delta.get("tool_calls", ()):
            message.setdefault("tool_calls", []).append({name: call[name] for name in ("id", "type", "function")})
        if part["logprobs"] is not None:
            choice["logprobs"]["content"] += part["logprobs"]["content"]
        if part["finish_reason"] and "tool_calls" in message:
            message["content"] = message["content"] or None
        super().merge(choice, part)

    async def parts(self) -> Parts:
        """See OpenAIAnswer; each part has a `delta`, the first of a choice its role."""
        parsers = [self._parser() for _ in range(self._count)]
        marks = self._context.form.answer_marks if parsers[0] is not None else ()
        texts = [AnswerText(self._context.vocabulary, self._rules, marks) for _ in range(self._count)]
        begun: set[int] = set()
        with Submission(self._context.pool, self._requests, self._session) as running:
            async for index, update in running.updates():
                progress = texts[index].feed(update)
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

    def _parser(self) -> ToolCallParser | None:
        """What separates an answer; None: all of it is content."""
        form, may_call = self._context.form, self._tools is not None
        if not may_call and not form.has_apart:
            return None
        return ToolCallParser(form, self._tools or (), self._opened, may_call)

    def _part(self, index: int, progress: AnswerProgress, parser: ToolCallParser | None) -> dict[str, Any]:
        found, first, finish = [AnswerDelta(progress.text, "", [])], 0, progress.finish
        if parser is not None:
            first = parser.count
            found = [parser.feed(progress.text)] + ([parser.finish()] if finish is not None else [])
            if finish == "stop" and parser.count:
                finish = "tool_calls"
        texts = {"content": "".join(each.content for each in found)}
        texts["reasoning_content"] = "".join(each.reasoning for each in found)
        delta: dict[str, Any] = {name: text for name, text in texts.items() if text}
        if calls := [call for each in found for call in each.calls]:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls, start=first)]
        return {
            "index": index,
            "delta": delta,
            "logprobs": chat_logprobs(self._context.vocabulary, progress) if self._wants_logprobs else None,
            "finish_reason": finish,
            "stop_reason": progress.stop_reason,
        }


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
