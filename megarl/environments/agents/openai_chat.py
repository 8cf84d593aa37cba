"""OpenAI's chat completions for agents: requests and answers of `/v1/chat/completions`."""

from collections.abc import Sequence
from typing import Any, Literal

from starlette.responses import Response

from megarl.environments.agents.dialect import streamed, token_fields, turns
from megarl.environments.agents.session import Session
from megarl.environments.calls import Ask, Reply
from megarl.serving.answers import ChatAnswer, Parts, chat_part, conversation
from megarl.serving.error_answers import JSONResponse, invalid
from megarl.serving.schemas import ChatCompletionRequest, FreeObject

MAX_CHOICES = 64
_IGNORED = ("temperature", "top_p", "top_k", "min_p", "seed")


class AgentChatRequest(ChatCompletionRequest):
    """A request of an agent; that a call is required has no effect."""

    tool_choice: Literal["none", "auto", "required"] | FreeObject | None = None
    return_tokens_as_token_ids: bool | None = None  # of vLLM: log-probs name tokens so
    return_token_ids: bool | None = None  # of vLLM


async def complete_chat(session: Session, request: AgentChatRequest) -> Response:
    """Answers a request with the policy's next turns."""
    _check_logprobs(session, request)
    if request.stop_token_ids or request.ignore_eos:
        raise invalid("stop_token_ids and ignore_eos: not supported here", "stop_token_ids")
    count = request.n or 1
    if count > MAX_CHOICES:
        raise invalid(f"n {count}: allowed are 1 to {MAX_CHOICES}", "n")
    replies = await turns(session, ask_of(request), request, _IGNORED, request.tool_choice, count)
    answer = AgentChat(session, request, replies)
    if request.stream:
        return streamed([chunk async for chunk in answer.chunks()], b"data: [DONE]\n\n")
    return JSONResponse(await answer.whole())


def ask_of(request: AgentChatRequest) -> Ask:
    """What the policy is asked. RequestError 400."""
    return Ask(*conversation(request), request.max_completion_tokens or request.max_tokens, tuple(request.stops))


class AgentChat(ChatAnswer):
    """The answer to one request, of a turn for each choice."""

    def __init__(self, session: Session, request: AgentChatRequest, replies: Sequence[Reply]):
        super().__init__(request.model or "policy", request, len(replies))
        self._session, self._request, self._replies = session, request, replies
        self.prompt_tokens = len(replies[0].prompt)
        self.generated_tokens = sum(len(reply.tokens) for reply in replies)

    async def parts(self) -> Parts:
        """See OpenAIAnswer: of each choice its role, its thoughts, its text, its calls and its end."""
        for index, reply in enumerate(self._replies):
            message = reply.message
            yield chat_part(index, {"role": "assistant", "content": ""})
            for name in ("reasoning_content", "content"):
                if message.get(name):
                    yield chat_part(index, {name: message[name]})
            calls = message.get("tool_calls", ())
            for number, call in enumerate(calls):
                yield chat_part(index, {"tool_calls": [{"index": number, **call}]})
            yield chat_part(index, {}, reply.finish, bool(calls))

    async def whole(self) -> dict[str, Any]:
        """See OpenAIAnswer; with what a stream has no place for: errors of calls, and tokens."""
        answer = await super().whole()
        shows_ids = bool(self._request.return_token_ids and self._session.shows_tokens)
        if shows_ids:
            answer["prompt_token_ids"] = list(self._replies[0].prompt)
        for choice, reply in zip(answer["choices"], self._replies, strict=True):
            if "tool_call_errors" in reply.message:
                choice["message"]["tool_call_errors"] = reply.message["tool_call_errors"]
            choice["message"] |= token_fields(self._session, reply)
            if self._wants_logprobs:
                found = zip(reply.tokens, reply.logprobs, strict=True)  # named by their ids as vLLM does
                named = [{"token": f"token_id:{token}", "logprob": value} for token, value in found]
                content = [{**each, "bytes": None, "top_logprobs": []} for each in named]
                choice["logprobs"] = {"content": content, "refusal": None}
            if shows_ids:
                choice["token_ids"] = list(reply.tokens)
        return answer


def _check_logprobs(session: Session, request: AgentChatRequest):
    """RequestError 400 for log-probs that this endpoint cannot give: it has ids of tokens, but not their texts."""
    by_id = request.return_tokens_as_token_ids or request.return_token_ids
    if request.top_logprobs or request.logprobs and not (session.shows_tokens and by_id and not request.stream):
        problem = "an agent's endpoint has none; an answer in a session that is not streamed has those of the written"
        raise invalid(f"logprobs: {problem} tokens, with return_tokens_as_token_ids", "logprobs")
