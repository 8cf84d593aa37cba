"""Each field that clients' own type definitions allow is used, changes nothing, or is refused by its name.

The types are those of the installed packages, so a new version of one cannot bring a field that is dropped in silence.
"""

import asyncio
import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import openai.types.chat as chat_types
import openai.types.responses as response_types
import pytest
from openai._types import omit
from openai.lib._parsing._responses import parse_response
from openai.types.chat import ParsedChatCompletionMessage
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion_message_function_tool_call_param import Function
from openai.types.responses import response_create_params, response_input_item_param
from openai.types.shared_params import FunctionDefinition
from pydantic import BaseModel, ValidationError

from megarl.environments.agents import anthropic_messages, openai_responses
from megarl.environments.agents import openai_chat as chats
from megarl.environments.calls import Reply, canonical
from megarl.environments.protocol import parse_turn
from megarl.serving import schemas
from megarl.serving.answers import conversation
from megarl.serving.error_answers import RequestError, validation_error
from megarl.serving.schemas import ChatCompletionRequest
from tests.helpers.envs.odd_agents import CALL as CALL_TEXT
from tests.helpers.server.client_fields import fields_of

TEXT = {"type": "text", "text": "t"}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def plan(*names: str) -> frozenset[str]:
    return frozenset(name for line in names for name in line.split())


class Dialect(NamedTuple):
    """A schema, what of a request reaches the policy, and what becomes of fields, by their place."""

    schema: type[BaseModel]
    prompt: Callable[[Any], Any]
    body: dict[str, Any]
    types: dict[str, Any]  # of the objects in `body`, by their path
    used: frozenset[str]
    ignored: frozenset[str]


CHAT_BODY = {
    "messages": [
        {"role": "developer", "content": "s"}, {"role": "user", "content": [TEXT]},
        {"role": "assistant", "content": "a", "tool_calls": [CALL]},
        {"role": "tool", "content": "r", "tool_call_id": "c"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
}  # fmt: skip
CHAT_TYPES = {
    "": chat_params.CompletionCreateParamsNonStreaming,
    "messages.0": chat_types.ChatCompletionDeveloperMessageParam,
    "messages.1": chat_types.ChatCompletionUserMessageParam,
    "messages.1.content.0": chat_types.ChatCompletionContentPartTextParam,
    "messages.2": chat_types.ChatCompletionAssistantMessageParam,
    "messages.2.tool_calls.0": chat_types.ChatCompletionMessageFunctionToolCallParam,
    "messages.2.tool_calls.0.function": Function,
    "messages.3": chat_types.ChatCompletionToolMessageParam,
    "tools.0": chat_types.ChatCompletionFunctionToolParam,
    "tools.0.function": FunctionDefinition,
}
CHAT_USED = plan(
    "messages model tools tool_choice logprobs top_logprobs max_completion_tokens max_tokens n seed stop stream",
    "stream_options temperature top_p user prompt_cache_key",
    "messages.0.content messages.0.role messages.0.name messages.1.content messages.1.role messages.1.name",
    "messages.1.content.0.text messages.1.content.0.type messages.2.content messages.2.role messages.2.name",
    "messages.2.tool_calls messages.2.tool_calls.0.id messages.2.tool_calls.0.function",
    "messages.2.tool_calls.0.type messages.2.tool_calls.0.function.name messages.2.tool_calls.0.function.arguments",
    "messages.3.role messages.3.content messages.3.tool_call_id tools.0.type tools.0.function tools.0.function.name",
    "tools.0.function.description tools.0.function.parameters",
)
SERVICE = "metadata store service_tier safety_identifier prompt_cache_retention prompt_cache_options"
CHAT_IGNORED = plan(SERVICE, "tools.0.function.strict messages.1.content.0.prompt_cache_breakpoint")

RESPONSES_BODY = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "t"}]},
        {"type": "reasoning", "id": "i", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {"type": "message", "id": "i", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "t", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
    ],
    "tools": [{"type": "function", "strict": None, **FUNCTION}],
}  # fmt: skip
RESPONSES_TYPES = {
    "": response_create_params.ResponseCreateParamsNonStreaming,
    "input.0": response_types.EasyInputMessageParam,
    "input.0.content.0": response_types.ResponseInputTextParam,
    "input.1": response_types.ResponseReasoningItemParam,
    "input.2": response_types.ResponseOutputMessageParam,
    "input.2.content.0": response_types.ResponseOutputTextParam,
    "input.3": response_types.ResponseFunctionToolCallParam,
    "input.4": response_input_item_param.FunctionCallOutput,
    "tools.0": response_types.FunctionToolParam,
}
RESPONSES_USED = plan(
    "input instructions model tools tool_choice max_output_tokens stream input.0.role input.0.content input.0.type",
    "input.0.content.0.text input.0.content.0.type input.1.type input.1.content input.2.type input.2.role",
    "input.2.content input.2.content.0.type input.2.content.0.text input.3.type input.3.call_id input.3.name",
    "input.3.arguments input.4.type input.4.call_id input.4.output tools.0.type tools.0.name tools.0.description",
    "tools.0.parameters",
)
RESPONSES_IGNORED = plan(
    SERVICE, "include reasoning user prompt_cache_key temperature top_p tools.0.strict",
    "input.0.phase input.0.content.0.prompt_cache_breakpoint input.1.id input.1.summary input.1.status input.2.id",
    "input.2.status input.2.phase input.2.content.0.annotations input.2.content.0.logprobs input.3.id input.3.status",
    "input.3.caller input.4.id input.4.status input.4.name input.4.caller",
)  # fmt: skip

MESSAGES_BODY = {
    "model": "m", "max_tokens": 9,
    "messages": [
        {"role": "user", "content": [TEXT]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "so", "signature": ""}, TEXT,
            {"type": "tool_use", "id": "c", "name": "f", "input": {}},
        ]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
}  # fmt: skip
MESSAGES_TYPES = {
    "": "message_create_params.MessageCreateParamsNonStreaming",
    "messages.0": "user_message_param.UserMessageParam",
    "messages.0.content.0": "TextBlockParam",
    "messages.1": "assistant_message_param.AssistantMessageParam",
    "messages.1.content.0": "ThinkingBlockParam",
    "messages.1.content.2": "ToolUseBlockParam",
    "messages.2.content.0": "ToolResultBlockParam",
    "tools.0": "ToolParam",
}
MESSAGES_USED = plan(
    "max_tokens messages model stop_sequences stream system tool_choice tools messages.0.role messages.0.content",
    "messages.0.content.0.text messages.0.content.0.type messages.1.role messages.1.content",
    "messages.1.content.0.thinking messages.1.content.0.type messages.1.content.2.type messages.1.content.2.id",
    "messages.1.content.2.name messages.1.content.2.input messages.2.content.0.type messages.2.content.0.content",
    "messages.2.content.0.tool_use_id tools.0.name tools.0.description tools.0.input_schema",
)
MESSAGES_IGNORED = plan(
    "metadata cache_control service_tier inference_geo speed temperature top_p top_k tools.0.type",
    "tools.0.cache_control tools.0.strict tools.0.eager_input_streaming messages.0.content.0.cache_control",
    "messages.0.content.0.citations messages.1.content.0.signature messages.1.content.2.cache_control",
    "messages.1.content.2.caller messages.2.content.0.cache_control messages.2.content.0.is_error",
)


RESPONSES = RESPONSES_BODY, RESPONSES_TYPES, RESPONSES_USED, RESPONSES_IGNORED
MESSAGES = MESSAGES_BODY, MESSAGES_TYPES, MESSAGES_USED, MESSAGES_IGNORED
DIALECTS = {
    "chat": Dialect(ChatCompletionRequest, conversation, CHAT_BODY, CHAT_TYPES, CHAT_USED, CHAT_IGNORED),
    "agent chat": Dialect(chats.AgentChatRequest, chats.ask_of, CHAT_BODY, CHAT_TYPES, CHAT_USED, CHAT_IGNORED),
    "responses": Dialect(openai_responses.ResponsesRequest, openai_responses.ask_of, *RESPONSES),
    "messages": Dialect(anthropic_messages.MessagesRequest, anthropic_messages.ask_of, *MESSAGES),
}


def type_of(kind: Any) -> Any:
    """A type of anthropic's is named by its place there, because that package may be missing."""
    if not isinstance(kind, str):
        return kind
    found: Any = pytest.importorskip("anthropic.types")
    for name in kind.split("."):
        found = getattr(found, name)
    return found


def with_field(body: dict, path: str, name: str, value: Any) -> dict:
    """The body with a field of the object at a path."""
    made = copy.deepcopy(body)
    place: Any = made
    for part in filter(None, path.split(".")):
        place = place[int(part) if part.isdigit() else part]
    place[name] = value
    return made


def outcome(dialect: Dialect, body: dict) -> tuple[Any, str]:
    """(what reaches the policy, or None; why the request is refused, or nothing)."""
    try:
        return dialect.prompt(dialect.schema.model_validate(body)), ""
    except ValidationError as error:
        return None, str(validation_error(error.errors(), body))
    except RequestError as error:
        return None, str(error)


CASES = [(name, path) for name, dialect in DIALECTS.items() for path in dialect.types]


@pytest.mark.parametrize("name, path", CASES)
def test_each_field_of_the_clients_types_has_a_use_no_effect_or_an_error_that_names_it(name, path):
    dialect = DIALECTS[name]
    plain, _ = outcome(dialect, dialect.body)
    assert plain is not None
    fields = fields_of(type_of(dialect.types[path]))
    assert fields
    for field, values in fields.items():
        full = f"{path}.{field}" if path else field
        found = [(value, *outcome(dialect, with_field(dialect.body, path, field, value))) for value in values]
        assert found, full
        assert all(field in refused for _, prompt, refused in found if prompt is None), (full, found)
        if full in dialect.used:
            continue
        assert all(prompt == plain for _, prompt, _ in found if prompt is not None), f"{full} reaches the template"
        is_ignored = all(prompt is not None for _, prompt, _ in found)
        assert is_ignored == (full in dialect.ignored), (full, found)


@pytest.mark.parametrize("name, body, said", [
    ("chat", {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools.0.function.strict: "),
    ("chat", {"tool_choice": "required"}, "tool_choice: 'required' is not supported, because nothing constrains what"),
    ("chat", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, 'allowed: null, "none", "auto"'),
    ("chat", {"response_format": {"type": "json_object"}}, "response_format: {'type': 'json_object'} is not supported"),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True}}},
     'because nothing constrains what the policy writes; allowed: null, {"type": "text"}'),
    ("chat", {"reasoning_effort": "low"}, "reasoning_effort: 'low' is not supported, because no chat template reads"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
     "messages: message 0 has an image, which is not read here"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
     "'text', 'image_url'"),
    ("responses", {"previous_response_id": "resp_1"}, "because nothing is stored between requests; allowed: null"),
])  # fmt: skip
def test_an_error_names_the_inner_field_and_what_is_allowed(name, body, said):
    dialect = DIALECTS[name]
    _, refused = outcome(dialect, {**dialect.body, **body})
    assert said in refused


REPLY = Reply(parse_turn(CALL_TEXT, 0), "stop", [1], [2], [-0.1])


def forms(item: BaseModel) -> list[dict]:
    """An item of an answer as clients send it back."""
    return [item.model_dump(), item.model_dump(exclude_unset=True), item.model_dump(exclude_none=True)]


def agents_message() -> dict:
    request = chats.AgentChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}]})
    answer = chats.AgentChat(SimpleNamespace(shows_tokens=False), request, [REPLY])
    return asyncio.run(answer.whole())["choices"][0]["message"]


def sent_back() -> list[tuple[str, dict]]:
    """(dialect, a request with an answer of ours as the client's own types write it)."""
    found: list[tuple[str, dict]] = []
    message = chat_types.ChatCompletionMessage.model_validate(agents_message())
    parsed = ParsedChatCompletionMessage.model_validate(message.model_dump())
    user = {"role": "user", "content": "a"}
    found += [("agent chat", {"messages": [user, form]}) for each in (message, parsed) for form in forms(each)]
    made = openai_responses.answer_of(openai_responses.ResponsesRequest(input="a"), REPLY)
    answer = response_types.Response.model_validate(made)
    parsed_answer = parse_response(text_format=omit, input_tools=omit, response=answer)
    for each in (answer, parsed_answer):
        found += [("responses", {"input": [user, *items]}) for items in zip(*map(forms, each.output), strict=True)]
    return found


@pytest.mark.parametrize("name, body", sent_back())
def test_an_answer_that_a_client_sends_back_is_the_policys_own_turn(name, body):
    ask, refused = outcome(DIALECTS[name], body)
    assert not refused
    _, turn = ask.messages
    assert canonical(turn) == canonical(REPLY.message) and turn["reasoning_content"] == "so"


def test_an_answer_that_anthropics_client_sends_back_is_the_policys_own_turn():
    types = pytest.importorskip("anthropic.types")
    usage = {"input_tokens": 1, "output_tokens": 1}
    made = {"id": "i", "type": "message", "role": "assistant", "model": "m", "stop_reason": "tool_use",
            "stop_sequence": None, "usage": usage, "content": anthropic_messages.blocks_of(REPLY)}  # fmt: skip
    blocks = types.Message.model_validate(made).content
    for content in zip(*map(forms, blocks), strict=True):
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": list(content)}]
        ask, refused = outcome(DIALECTS["messages"], {"model": "m", "max_tokens": 9, "messages": messages})
        assert not refused
        assert canonical(ask.messages[1]) == canonical(REPLY.message) and ask.messages[1]["reasoning_content"] == "so"


# -- what is long ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model, name, value", [
    (schemas.DetokenizeRequest, "tokens", [-1] * 99), (schemas.CompletionRequest, "prompt", [-1] * 99),
    (schemas.CompletionRequest, "prompt", [[-1] * 9] * 99), (schemas.CompletionRequest, "prompt", [1.5] * 99),
    (schemas.GenerateRequest, "input_ids", [["a"] * 9] * 99), (schemas.GenerateRequest, "key", ["a"] * 99),
])  # fmt: skip
def test_a_long_list_of_wrong_items_has_few_errors(model, name, value):
    with pytest.raises(ValidationError) as caught:
        model.model_validate({"input_ids": [1], name: value} if model is schemas.GenerateRequest else {name: value})
    assert caught.value.error_count() <= 4


def test_free_json_has_a_number_of_values():
    assert schemas.check_json([[1] * 100] * 100) and schemas.check_json({"a": "x" * 10**6})
    for value in ([1] * 2**17, [[1] * 2**10] * 2**7):
        with pytest.raises(ValueError, match="more than 65536 values"):
            schemas.check_json(value)
