"""Agents that use every dialect, agents that do what none should, and a policy that answers them by a script."""

import asyncio
import base64
import contextlib
import json
import re
import socket

import httpx
from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI

from megarl.environments.calls import CONTEXT_LENGTH, Asked, Reply
from megarl.environments.pool import EnvironmentPool, PoolOptions
from megarl.environments.protocol import Task, parse_turn
from tests.helpers.server import rude_clients
from tests.helpers.texts.picture_prompts import encoded, picture
from tests.helpers.waiting import SAFETY_SECONDS

HERE = "tests.helpers.envs.odd_agents"
CALL = '<think>so</think>42 <tool_call>{"name": "add", "arguments": {"x": [1, "ä"]}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
USER = [{"role": "user", "content": "12"}]


def pool_of(timeout: float = SAFETY_SECONDS, retries: int = 0, images=None) -> EnvironmentPool:
    return EnvironmentPool(PoolOptions(1, timeout, retries, "hermes", f"{HERE}:chats", images))


def play(pool: EnvironmentPool, name: str, texts=(), turns: int = 9) -> tuple:
    """(the last event of an agent's episode, its requests); the policy writes `texts`, then 42, for at most `turns`."""
    asks: list = []
    task = Task([{"role": "user", "content": "12+30="}], answer="42", metadata={"n": 1}, seed=7, sample_seed=8)
    pool.start(0, task, name if ":" in name else f"{HERE}:{name}")
    while True:
        for event in pool.poll(1.0):
            if not isinstance(event, Asked):
                pool.end(0)
                return event, asks
            pool.reply(0, event.ticket, event.request, _reply(len(asks), texts, turns))
            asks.append(event.ask)


def played(pool: EnvironmentPool, name: str, texts=(), reward: float = 1.0) -> list:
    """The requests of an agent that ends with this reward."""
    event, asks = play(pool, name, texts)
    assert event.failure is None and event.is_agent and event.observation.done, event.failure
    assert event.observation.reward == reward
    return asks


def played_with_a_result(pool: EnvironmentPool, name: str) -> list:
    """The requests of an agent that asks in a dialect with a call and its result."""
    asks = played(pool, name, [CALL, "42", CALL])
    assert len(asks) == 3
    system, _, turn, result, *_ = asks[1].messages
    assert system == {"role": "system", "content": "be right"} and turn["content"] == "42"
    assert turn["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": [1, "ä"]}}
    assert (result["role"], result["name"], result["content"]) == ("tool", "add", "43")
    assert asks[1].max_tokens == 9 and asks[1].tools[0]["function"]["name"] == "add"
    return asks


def _reply(number: int, texts, turns: int) -> Reply:
    if number >= turns:
        return Reply(None, error="This model's maximum context length is exceeded", code=CONTEXT_LENGTH, is_budget=True)
    text = texts[number] if number < len(texts) else "42"
    return Reply(parse_turn(text, number), "stop", [1, 2, 3], [4, 5], [-0.1, -0.2])


# -- agents that do what they should ------------------------------------------------------------------------------


async def chats(task, client) -> float:
    """Chat completions: whole, streamed, several choices."""
    assert (task.prompt, task.answer, task.metadata, task.seed) == ("12+30=", "42", {"n": 1}, 7)
    fields = {"model": "m", "messages": task.messages, "tools": [TOOL]}
    answer = await client.chat.completions.create(**fields)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls" and message.content == "42"
    assert message.reasoning_content == "so"
    (call,) = message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"x": [1, "ä"]}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2)
    content, calls, usage = "", [], None
    async for chunk in await client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
    assert content == "42" and usage.total_tokens == 5
    assert json.loads(calls[0].function.arguments) == {"x": [1, "ä"]}
    both = await client.chat.completions.create(model="m", messages=task.messages, n=2, stop=["7", "8"])
    assert [choice.message.content for choice in both.choices] == ["42", "42"]
    assert [model.id async for model in client.models.list()] == ["policy"]
    return 0.5


async def asks_both_ways(task, client) -> float:
    """The same requests without a connection, and over one: the answers are equal but for ids and times."""
    request = {"model": "m", "messages": USER}
    wrong: list[dict] = [
        {"frequency": 1}, {"n": 1000}, {"messages": [{"role": "king", "content": "1"}]}, {"messages": "12"},
        {"messages": [{"content": "1"}]}, {"max_tokens": "1"}, {"logprobs": True}, {"tools": [{}]},
    ]  # fmt: skip
    found = []
    for one in (client, client.with_options(base_url=f"http://localhost:{client.base_url.port}/v1")):
        calls = [one.post("/chat/completions", body=request | fields, cast_to=object) for fields in ({}, *wrong)]
        calls += [one.post("/responses", body={"input": "12"}, cast_to=object)]
        calls += [one.post("/messages", body=request | fields, cast_to=object) for fields in ({}, {"max_tokens": 1})]
        calls += [one.get("/models/any/name", cast_to=object), one.get("/nothing", cast_to=object)]
        calls += [one.get("/responses", cast_to=object), one.post("/models", body=[], cast_to=object)]
        calls += [one.post("/responses", body=body, cast_to=object) for body in ([], None)]
        calls += [one.with_options(api_key="sk-of-another").get("/models", cast_to=object)]
        found.append([await _outcome(call) for call in calls])
    assert found[0] == found[1], [pair for pair in zip(*found, strict=True) if pair[0] != pair[1]]
    statuses = [status for status, _ in found[0] if status]
    assert statuses == [400] * 9 + [404, 405, 405, 400, 400, 401], statuses
    with contextlib.suppress(APIConnectionError):  # nobody listens there
        await client.with_options(base_url="http://127.0.0.1:1/v1").get("/models", cast_to=object)
        return 0.0
    huge = [{"role": "user", "content": "1" * (17 << 20)}]
    assert (await _outcome(client.chat.completions.create(model="m", messages=huge)))[0] == 413
    return 1.0


async def _outcome(call) -> tuple[int, str]:
    """(status if the request is refused, else 0; the answer without what differs from one to the next)."""
    try:
        return 0, re.sub(r"'(id|created|created_at)': [^,}]*", "", repr(await call))
    except APIStatusError as error:
        return error.status_code, repr(error.body)


async def responses(task, client) -> float:
    """OpenAI's responses: whole and streamed, with a call and its result."""
    tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
    fields = {"model": "m", "instructions": "be right", "tools": [tool], "max_output_tokens": 9}
    first = await client.responses.create(**fields, input="12")
    kinds = [item.type for item in first.output]
    assert kinds == ["reasoning", "message", "function_call"] and first.output_text == "42"
    history = [{"role": "user", "content": "12"}, *(item.model_dump(exclude_none=True) for item in first.output)]
    history.append({"type": "function_call_output", "call_id": first.output[2].call_id, "output": "43"})
    stream = await client.responses.create(**fields, input=history, stream=True)
    events = [event async for event in stream]
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "42"
    last = [event async for event in await client.responses.create(**fields, input="13", stream=True)]
    assert [item.type for item in last[-1].response.output] == kinds
    (done,) = (event for event in last if event.type == "response.function_call_arguments.done")
    assert done.name == "add" and json.loads(done.arguments) == {"x": [1, "ä"]}
    return float(events[-1].response.output_text == "42")


async def messages(task, client) -> float:
    """Anthropic's messages, by hand: whole and streamed, with a call and its result."""
    root = str(client.base_url).removesuffix("/v1/")
    headers, url = {"x-api-key": client.api_key, "anthropic-version": "2023-06-01"}, f"{root}/v1/messages"
    tool = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
    body = {"model": "m", "max_tokens": 9, "system": "be right", "tools": [tool], "stop_sequences": ["7"]}
    async with httpx.AsyncClient(headers=headers) as http:
        found = (await http.post(url, json={**body, "messages": [{"role": "user", "content": "12"}]})).json()
        assert [block["type"] for block in found["content"]] == ["thinking", "text", "tool_use"], found
        assert found["stop_reason"] == "tool_use" and found["usage"]["output_tokens"] == 2
        result = {"type": "tool_result", "tool_use_id": found["content"][2]["id"], "content": "43"}
        history = [
            {"role": "user", "content": "12"}, {"role": "assistant", "content": found["content"]},
            {"role": "user", "content": [result, {"type": "text", "text": "go on"}]},
        ]  # fmt: skip
        streamed = await http.post(url, json={**body, "messages": history, "stream": True})
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: ")]
        assert events[0]["type"] == "message_start" and events[-1]["type"] == "message_stop"
        last = await http.post(url, json={**body, "messages": [{"role": "user", "content": "13"}], "stream": True})
        assert '"name":"add"' in last.text and '"type":"message_stop"' in last.text
        refused = (await http.post(url, json={"model": "m"})).json()
        assert refused["type"] == "error" and "max_tokens" in refused["error"]["message"]
        return float(events[2]["delta"]["text"] == "42")


async def shows(task, client) -> float:
    """Sends an image in every dialect, and some that nobody can read; says how many requests were refused."""
    data = encoded(picture(48, 32))
    whole, damaged = (base64.b64encode(each).decode() for each in (data, data[:200]))
    ask = {"type": "text", "text": "what?"}

    def messages(url: str) -> dict:
        image = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
        return {"model": "m", "messages": [{"role": "user", "content": [image, ask]}]}

    url, refused = f"data:image/png;base64,{whole}", 0
    for each in (url, f"data:image/png;base64,{damaged}", "https://example.org/a.png", url):
        try:
            await client.chat.completions.create(**messages(each))
        except APIStatusError as error:
            assert error.status_code == 400, error
            refused += 1
    parts = [{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": url, "detail": "auto"}]
    with contextlib.suppress(APIStatusError):
        await client.responses.create(model="m", input=[{"role": "user", "content": parts}])
    source = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": whole}}
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    said = [{"role": "user", "content": [source, ask]}, {"role": "assistant", "content": [call]}]
    said.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [ask, source]}]})
    body = {"model": "m", "max_tokens": 9, "messages": said}
    await _outcome(client.with_options(max_retries=0).post("/messages", body=body, cast_to=object))
    return float(refused)


# -- agents that do what they should not --------------------------------------------------------------------------


async def strange_requests(task, client) -> float:
    """Requests that no schema has; each is refused, and the next right one is answered."""
    url, key = f"{client.base_url}chat/completions", {"Authorization": f"Bearer {client.api_key}"}
    right = {"model": "m", "messages": USER}
    deep: list = []
    for _ in range(200):
        deep = [deep]
    refused = [
        (401, "key", {"headers": {"Authorization": "Bearer sk-of-another"}, "json": right}),
        (401, "key", {"json": right}),
        (400, "frequency", {"headers": key, "json": right | {"frequency": 1}}),
        (400, "messages", {"headers": key, "json": {"model": "m", "messages": "12"}}),
        (400, "messages.0", {"headers": key, "json": {"model": "m", "messages": [{"role": "king", "content": "1"}]}}),
        (400, "logprobs", {"headers": key, "json": right | {"logprobs": True}}),
        (400, "n 1000", {"headers": key, "json": right | {"n": 1000}}),
        (400, "tools", {"headers": key, "json": right | {"tools": [{**TOOL, "function": {**TOOL["function"],
                                                                                        "parameters": {"x": deep}}}]}}),
        (400, "body", {"headers": {**key, "Content-Type": "application/json"}, "content": b"[" * 10_000}),
        (413, "bytes", {"headers": {**key, "Content-Type": "application/json"}, "content": b"1" * (100 << 20)}),
        (415, "Content-Type", {"headers": {**key, "Content-Type": "text/plain"}, "content": b"hello"}),
    ]  # fmt: skip
    async with httpx.AsyncClient(timeout=None) as http:
        for status, said, fields in refused:
            try:
                answer = await http.post(url, **fields)
            except (httpx.WriteError, httpx.ReadError):  # the answer came before the whole body, and the end with it
                assert status == 413
                continue
            assert answer.status_code == status and said in answer.json()["error"]["message"], answer.text
        assert (await http.get(f"{client.base_url}files", headers=key)).status_code == 404
    await client.chat.completions.create(**right)
    return 1.0


async def many_connections(task, client) -> float:
    """1,000 connections that say nothing, and then a request."""
    port = client.base_url.port
    held = []
    for _ in range(1000):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
        held.append(one)
        await asyncio.sleep(0)
    for one in held:
        one.close()
    await asyncio.sleep(0)
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=50) as other:
        return float((await other.chat.completions.create(model="m", messages=USER)).id != "")


async def breaks_off(task, client) -> float:
    """Breaks its requests off at every place, and then asks."""
    body = {"model": "m", "messages": USER, "stream": True}
    path = f"{client.base_url.path}chat/completions"
    await asyncio.to_thread(rude_clients.visit_all, client.base_url.port, path, body, client.api_key)
    return float((await client.chat.completions.create(model="m", messages=USER)).id != "")


async def times_out(task, client) -> float:
    """Waits too little; asks again, and gets the answer that it has missed. It may close its client."""
    async with client:
        try:
            await client.with_options(timeout=1e-9).chat.completions.create(model="m", messages=USER)
        except APITimeoutError:
            answer = await client.chat.completions.create(model="m", messages=USER)
    return float(answer.choices[0].message.content == "42")


async def repeats_what_is_refused(task, client) -> float:
    """Asks for what no policy gives, for ever."""
    while True:
        with contextlib.suppress(APIStatusError):
            await client.chat.completions.create(model="m", messages=USER, n=1000)


async def gives_up(task, client) -> float:
    """Asks until the client's own error says that the context is full, and ends by it."""
    while True:
        await client.chat.completions.create(model="m", messages=USER)


async def never_gives_up(task, client) -> float:
    """Asks again whatever the answer is."""
    while True:
        try:
            await client.chat.completions.create(model="m", messages=USER)
        except Exception:  # that is the point
            continue


async def raises(task, client) -> float:
    """Fails by a fault of its own."""
    await client.chat.completions.create(model="m", messages=USER)
    raise KeyError("of its own")


async def says_text(task, client) -> str:
    """Returns what is no score."""
    return "good"


async def sleeps(task, client) -> float:
    await asyncio.Event().wait()


async def is_impatient(task, client) -> float:
    """Goes away before the answer, and asks the same again: it gets the answer that it has missed."""
    request = {"model": "m", "messages": USER}
    first = asyncio.ensure_future(client.chat.completions.create(**request))
    await asyncio.sleep(0)
    first.cancel()
    return float((await client.chat.completions.create(**request)).choices[0].message.content == "42")
