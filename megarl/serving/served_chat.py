"""/v1/chat/completions: messages to messages through the server's chat template, with tool calls."""

from typing import Any

from starlette.responses import Response

from megarl.data.detokenizer import Vocabulary
from megarl.serving import sampling
from megarl.serving.answer_text import AnswerDelta, AnswerProgress, AnswerText, ToolCallParser, has_opened_thoughts
from megarl.serving.answers import Parts, finite
from megarl.serving.chat_core import ChatAnswer, chat_part, delta_of, offered
from megarl.serving.context import ServingContext
from megarl.serving.error_answers import invalid
from megarl.serving.replica_pool import Submission
from megarl.serving.schemas import ChatCompletionRequest


async def chat(context: ServingContext, request: ChatCompletionRequest) -> Response:
    """Answers one request; RequestError if it is wrong or cannot run."""
    context.check_model(request.model)
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs: needs logprobs true", "top_logprobs")
    prompt, images = await context.encode_messages(request)
    context.check_prompt([token for token in prompt if token >= 0], "messages")
    return await context.respond(ServedChat(context, request, prompt, images), request.stream)


class ServedChat(ChatAnswer):
    """The answer to one request, after its prompt's tokens; `images`: those among them, as replicas read them."""

    def __init__(self, context: ServingContext, request: ChatCompletionRequest, prompt: list[int], images: list[str]):
        super().__init__(context.config.model_name, request, sampling.choices(context, request))
        self._context, self._session = context, request.session
        self._tools = offered([tool.function for tool in request.tools or ()], request.tool_choice)
        self._rules, self.prompt_tokens = sampling.stop_rules(context, request), len(prompt)
        self._opened = has_opened_thoughts(context.form, context.vocabulary, prompt)
        top = request.top_logprobs or 0
        sampling.check_top_logprobs(context, top, "top_logprobs")
        if request.max_completion_tokens is not None:
            length = context.response_length(prompt, request.max_completion_tokens, "max_completion_tokens")
        else:
            length = context.response_length(prompt, request.max_tokens)
        self._requests = [
            sampling.generation(context, request, prompt, length, key, top)._replace(images=images)
            for key in sampling.stream_keys(request.seed, 1, self._count)
        ]

    async def parts(self) -> Parts:
        form, may_call = self._context.form, self._tools is not None
        parsers: list[ToolCallParser | None] = [None] * self._count  # all of an answer is content
        if may_call or form.has_apart:
            parsers = [ToolCallParser(form, self._tools or (), self._opened, may_call) for _ in parsers]
        marks = self._context.form.answer_marks if parsers[0] is not None else ()
        texts = [AnswerText(self._context.vocabulary, self._rules, marks) for _ in range(self._count)]
        begun: set[int] = set()
        with Submission(self._context.pool, self._requests, self._session) as running:
            async for index, update in running.updates():
                progress = texts[index].feed(update)
                self.generated_tokens += len(progress.tokens)
                self.more = {"system_fingerprint": progress.fingerprint}
                if progress.finish is not None:
                    running.end(index)
                part = self._part(index, progress, parsers[index])
                if index not in begun:
                    begun.add(index)
                    part["delta"] = {"role": "assistant", "content": "", **part["delta"]}
                if part["delta"] or part["finish_reason"] or part["logprobs"]:
                    yield part

    def _part(self, index: int, progress: AnswerProgress, parser: ToolCallParser | None) -> dict[str, Any]:
        found, first = [AnswerDelta(progress.text, "", [])], 0
        if parser is not None:
            first = parser.count
            found = [parser.feed(progress.text)] + ([parser.finish()] if progress.finish is not None else [])
        content, reasoning = "".join(each.content for each in found), "".join(each.reasoning for each in found)
        delta = delta_of(content, reasoning, [call for each in found for call in each.calls], first)
        has_calls = parser is not None and parser.count > 0
        logprobs = chat_logprobs(self._context.vocabulary, progress) if self._wants_logprobs else None
        part = chat_part(index, delta, progress.finish, has_calls, logprobs)
        return {**part, "stop_reason": progress.stop_reason}


def chat_logprobs(vocabulary: Vocabulary, progress: AnswerProgress) -> dict[str, Any] | None:
    """OpenAI's `logprobs` of chat answers; None without tokens."""

    def described(token: int, logprob: float | None) -> dict[str, Any]:
        text, data = vocabulary.token(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(data)}

    tops = progress.top or [()] * len(progress.tokens)
    content = [
        {**described(token, logprob), "top_logprobs": [described(other, value) for other, value in top or ()]}
        for token, logprob, top in zip(progress.tokens, progress.logprobs, tops, strict=True)
    ]
    return {"content": content} if content else None
