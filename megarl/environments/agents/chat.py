"""OpenAI's chat completions for agents: requests and answers of `/v1/chat/completions`."""

import asyncio
import secrets
import time
from collections.abc import Iterator
from typing import Any, Literal

from starlette.responses import Response

from megarl.environments.agents.dialect import name_forced_call, name_ignored, respond, token_fields, written
from megarl.environments.agents.session import Session
from megarl.environments.calls import Ask, Reply
from megarl.serving.errors import invalid
from megarl.serving.schemas import ChatCompletionRequest, FreeObject
from megarl.serving.tokenization import template_messages, template_tools

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
    name_ignored(request, _IGNORED)
    name_forced_call(request.tool_choice)
    replies = await asyncio.gather(*(written(session, _ask(request)) for _ in range(count)))
    common = {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": request.model or "policy",
    }
    if request.stream:
        with_usage = bool(request.stream_options and request.stream_options.include_usage)
        return respond(list(_chunks(common, replies, with_usage)), streams=True)
    choices = [
        {"index": index, "message": {"refusal": None, **_message(reply), **token_fields(session, reply)},
         "logprobs": _logprobs(reply) if request.logprobs else None, "finish_reason": finish_reason(reply)}
        for index, reply in enumerate(replies)
    ]  # fmt: skip
    answer = {**common, "object": "chat.completion", "choices": choices, "usage": usage(replies)}
    if request.return_token_ids and session.shows_tokens:
        answer["prompt_token_ids"] = list(replies[0].prompt)
        for choice, reply in zip(choices, replies, strict=True):
            choice["token_ids"] = list(reply.tokens)
    return respond([answer])


def _check_logprobs(session: Session, request: AgentChatRequest):
    """RequestError 400 for log-probs that this endpoint cannot give: it has ids of tokens, but not their texts."""
    by_id = request.return_tokens_as_token_ids or request.return_token_ids
    if request.top_logprobs or request.logprobs and not (session.shows_tokens and by_id and not request.stream):
        raise invalid("logprobs: an agent's endpoint has none; an answer in a session that is not streamed has those of"
                      " the written tokens, with return_tokens_as_token_ids", "logprobs")  # fmt: skip


def _logprobs(reply: Reply) -> dict[str, Any]:
    """The log-probs of the written tokens, which are named by their ids as vLLM does."""
    found = zip(reply.tokens, reply.logprobs, strict=True)
    named = [{"token": f"token_id:{token}", "logprob": value} for token, value in found]
    return {"content": [{**each, "bytes": None, "top_logprobs": []} for each in named], "refusal": None}


def _ask(request: AgentChatRequest) -> Ask:
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    may_call = bool(request.tools) and request.tool_choice != "none"
    return Ask(
        template_messages(request.messages), template_tools(request.tools or ()) if may_call else None,
        request.max_completion_tokens or request.max_tokens, tuple(stops),
    )  # fmt: skip


def finish_reason(reply: Reply) -> str:
    """Why the turn ended, in OpenAI's words."""
    assert reply.turn is not None
    return "tool_calls" if reply.turn.calls and reply.finish == "stop" else reply.finish


def usage(replies: list[Reply]) -> dict[str, int]:
    """Tokens of a request's prompt and of all its answers."""
    prompt, written = len(replies[0].prompt), sum(len(reply.tokens) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def _message(reply: Reply) -> dict[str, Any]:
    message = reply.message
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    return message


def _chunks(common: dict[str, Any], replies: list[Reply], with_usage: bool) -> Iterator[dict[str, Any]]:
    """The events of a stream: of each choice its role, its text, its calls and its end."""
    common = {**common, "object": "chat.completion.chunk"}

    def chunk(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**common, "choices": [choice]} | ({"usage": None} if with_usage else {})

    for index, reply in enumerate(replies):
        message = reply.message
        yield chunk(index, {"role": "assistant", "content": ""})
        for name in ("reasoning_content", "content"):
            if message.get(name):
                yield chunk(index, {name: message[name]})
        for number, call in enumerate(message.get("tool_calls", ())):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        yield chunk(index, {}, finish_reason(reply))
    if with_usage:
        yield {**common, "choices": [], "usage": usage(replies)}
