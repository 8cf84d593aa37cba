"""Errors, streams and images, as the clients of each dialect read and write them."""

import asyncio
import base64
import json
import re

import pytest

from megarl.data.images.book import Images
from megarl.data.images.names import PATTERN, readable
from megarl.environments.agents import anthropic_messages, openai_chat, openai_responses
from megarl.environments.agents.anthropic_messages import MessagesRequest
from megarl.environments.agents.dialect import ANTHROPIC, error_response, streamed, without_images
from megarl.environments.agents.openai_chat import AgentChatRequest
from megarl.environments.agents.openai_responses import ResponsesRequest
from megarl.environments.agents.session import Session
from megarl.serving.error_answers import RequestError
from tests.helpers.envs.odd_agents import played, pool_of
from tests.helpers.texts.picture_prompts import encoded, picture, processor_of, write_folder


def test_errors_and_events():
    error = RequestError(400, "wrong", "n", "a_code")
    assert json.loads(error_response(error, "/v1/responses").body) == error.content
    of_anthropic = {"type": "error", "error": {"type": "invalid_request_error", "message": "wrong"}}
    assert json.loads(error_response(error, ANTHROPIC).body) == of_anthropic
    body = streamed([{"type": "a"}, {"x": 1}], b"end").body
    assert body == b'event: a\ndata: {"type":"a"}\n\ndata: {"x":1}\n\nend'


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_images_reach_the_policy_in_every_dialect(tmp_path):
    images = Images(processor_of(write_folder(tmp_path / "model")))
    pool = pool_of(images=images)
    try:
        asks = played(pool, "shows", reward=2.0)
    finally:
        pool.close()
    shown = readable(json.dumps([ask.messages for ask in asks], ensure_ascii=False))
    (name,) = set(re.findall(r"\[image [^]]*\]", shown))
    contents = [[readable(message["content"]) for message in ask.messages] for ask in asks]
    assert contents == [[f"{name}what?"], [f"{name}what?"], [f"what?{name}"], [f"{name}what?", "", f"what?{name}"]]
    assert [message["role"] for message in asks[-1].messages] == ["user", "assistant", "tool"]
    assert len(images.found(asks[0].messages[0]["content"])) == 1


@pytest.mark.long
def test_images_are_refused_where_the_policy_reads_none(pool):
    assert played(pool, "shows", reward=4.0) == [] and pool.options.images is None


class Nowhere(Session):
    """A session whose requests nobody gets."""

    def __init__(self, **more):
        super().__init__(lambda number, ask, images: None, **more)


URL = f"data:image/png;base64,{base64.b64encode(encoded(picture(32, 32))).decode()}"
IMAGE = {"type": "image_url", "image_url": {"url": URL}}


ASK, DATA = {"type": "text", "text": "what?"}, URL.partition(",")[2]
SOURCE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
INPUT = {"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [ASK, SOURCE]}
DIALECTS = {
    "chat": (AgentChatRequest, openai_chat, {"messages": [{"role": "user", "content": [IMAGE, ASK, IMAGE]}]},
             ["{image}what?{image}"]),
    "responses": (ResponsesRequest, openai_responses, {"input": [
        {"role": "user", "content": [{"type": "input_text", "text": "what?"}, INPUT]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [INPUT]}]}, ["what?{image}", "", "{image}"]),
    "messages": (MessagesRequest, anthropic_messages, {"max_tokens": 9, "messages": [
        {"role": "user", "content": [SOURCE | {"cache_control": {"type": "ephemeral"}}, ASK]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        {"role": "user", "content": [RESULT, ASK, SOURCE]}]}, ["{image}what?", "", "what?{image}", "what?{image}"]),
}  # fmt: skip


@pytest.mark.parametrize("name", DIALECTS)
def test_images_of_every_dialect_are_marks(name):
    schema, dialect, body, expected = DIALECTS[name]

    async def read():
        return dialect.ask_of(schema.model_validate(await without_images(Nowhere(), {"model": "m"} | body)))

    contents = [PATTERN.sub("{image}", message["content"] or "") for message in asyncio.run(read()).messages]
    assert contents == expected


@pytest.mark.parametrize("request_of", [    lambda part: {"messages": [{"role": "assistant", "content": [part]}]},
    lambda part: {"messages": [{"role": "user", "content": [{**part, "other": 1}]}]},
    lambda part: {"messages": [{"role": "user", "content": "a"}], "metadata": [part]},
    lambda part: {"messages": part}, lambda part: [part], lambda part: {"messages": [None, 3, {"content": [[], None]}]},
])  # fmt: skip
def test_what_is_no_image_of_a_message_is_left_to_the_schema(request_of):
    async def read():
        return await without_images(Nowhere(), request_of(IMAGE))

    assert asyncio.run(read()) == request_of(IMAGE)


def test_images_that_a_session_does_not_take_and_marks_that_it_did_not_make():
    message = {"role": "user", "content": [IMAGE]}

    async def read(**more):
        session = Nowhere(**more)
        found = (await without_images(session, {"messages": [message]}))["messages"][0]["content"][0]["text"]
        return found, [session.without_false_marks({"role": role, "content": f"{found}{found.replace('a', 'b')}"})
                       for role in ("user", "assistant")]  # fmt: skip

    found, (user, assistant) = asyncio.run(read())
    assert user["content"] == found + found.replace("a", "b").replace("\ufdd2", "\ufffd") != assistant["content"]
    with pytest.raises(RequestError, match="messages: has an image, which is not read here"):
        asyncio.run(read(reads_images=False))
