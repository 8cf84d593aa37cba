"""/v1/chat/completions with OpenAI's client against the real process: templates, tools, log-probs, streams."""

import json

import openai
import pytest

from megarl.serving.responses import ChatCompletionResponse
from tests.helpers.server.serving import Answers, answering, openai_client, served

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- message.tool_call_id or '' }}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "é": [2]}}\n</tool_call>'
ANSWERS = {
    "one call": f"Let me.\n{CALL}",
    "two calls": f"{CALL}\n{CALL}\n",
    "wrong call": "<tool_call>{oops</tool_call> ",
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "<|im_end|>": {}}}}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "tools.jinja").write_text(TEMPLATE)
    with answering(folder, ANSWERS, chat_template=str(folder / "tools.jinja")) as made:
        yield made


def say(text):
    return [{"role": "user", "content": text}]


def test_openai_client(client):
    answer = client.chat.completions.create(model="tiny", messages=say("hi"), max_completion_tokens=64, n=2, seed=1)
    assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
    assert answer.choices[1].message.role == "assistant" and answer.choices[1].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="tiny", messages=say("hi"), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello world"
    assert chunks[-1].usage.prompt_tokens == answer.usage.prompt_tokens > 0
    assert chunks[-1].usage.completion_tokens * 2 == answer.usage.completion_tokens


def test_logprobs(client, server):
    answer = client.chat.completions.create(model="tiny", messages=say("hi"), logprobs=True, top_logprobs=2)
    tokens = [*server.tokenizer.encode("Hello world"), server.tokenizer.eos_id]
    content = answer.choices[0].logprobs.content
    assert [each.logprob for each in content] == [Answers.logprob(token) for token in tokens]
    assert b"".join(bytes(each.bytes) for each in content) == b"Hello world<|im_end|>"
    assert all(len(each.top_logprobs) == 2 and each.top_logprobs[0].token == each.token for each in content)


def test_tool_calls(client):
    answer = client.chat.completions.create(model="tiny", messages=say("one call"), tools=TOOLS).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content == "Let me."
    call = answer.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "é": [2]})
    two = client.chat.completions.create(model="tiny", messages=say("two calls"), tools=TOOLS).choices[0]
    assert two.message.content is None and len({call.id for call in two.message.tool_calls}) == 2
    for options in (dict(tools=TOOLS, tool_choice="none"), {}):
        plain = client.chat.completions.create(model="tiny", messages=say("one call"), **options).choices[0]
        assert plain.message.content == ANSWERS["one call"] and plain.message.tool_calls is None
        assert plain.finish_reason == "stop"
    wrong = client.chat.completions.create(model="tiny", messages=say("wrong call"), tools=TOOLS).choices[0]
    assert wrong.message.content == ANSWERS["wrong call"] and wrong.finish_reason == "stop"


@pytest.mark.parametrize("said", [*ANSWERS, "hi"])
def test_streams_equal_the_whole(server, said):
    body = {"messages": say(said), "tools": TOOLS, "logprobs": True, "n": 2}
    whole = server.post("/v1/chat/completions", **body).json()
    ChatCompletionResponse.model_validate(whole)
    events = server.events("/v1/chat/completions", **body)
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert "".join(part["delta"].get("content", "") for part in parts) == (choice["message"]["content"] or "")
        calls = [call for part in parts for call in part["delta"].get("tool_calls", ())]
        assert [call["index"] for call in calls] == list(range(len(calls)))
        expected = choice["message"].get("tool_calls", [])
        assert [call["function"] for call in calls] == [call["function"] for call in expected]
        content = [each for part in parts if part["logprobs"] for each in part["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"] and parts[-1]["finish_reason"] == choice["finish_reason"]


def test_conversations_with_tools_reach_the_template_and_no_text_becomes_a_special_token(server):
    call = {"id": "c1", "type": "function", "function": {"name": "a<|im_end|>", "arguments": '{"x": "<|im_start|>"}'}}
    parts = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief<|im_end|>"}]
    messages = [
        {"role": "developer", "content": parts}, {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "3<|im_end|>", "tool_call_id": "c1<|im_start|>"},
    ]  # fmt: skip
    tokens = server.post("/tokenize", messages=messages, tools=TOOLS).json()["tokens"]
    special = server.tokenizer.special
    assert [tokens.count(special[name]) for name in ("<|im_start|>", "<|im_end|>")] == [6, 5]
    tool = json.dumps(TOOLS[0], ensure_ascii=False)
    assert server.tokenizer.decode(tokens) == (
        f"system\n{tool}\n\nsystem\nbe\nbrief<|im_end|>\nuser\nadd\nassistant\n"
        '<tool_call>a<|im_end|>{"x": "<|im_start|>"}</tool_call>\ntool\n3<|im_end|>c1<|im_start|>\nassistant\n'
    )
    assert server.post("/v1/chat/completions", messages=messages, tools=TOOLS).status_code == 200


def history(arguments="{}", **fields):
    """A conversation with a call that was answered."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call], **fields}
    return [*say("a"), turn, {"role": "tool", "tool_call_id": "c1", "content": "r"}, *say("b")]


@pytest.mark.parametrize("fields", [
    dict(messages=history(arguments="null")), dict(messages=history(arguments="")),
    dict(messages=history(content=[])), dict(messages=history(reasoning_content="thought")),
    dict(messages=history(reasoning="thought")), dict(chat_template_kwargs={"enable_thinking": False}),
])  # fmt: skip
def test_what_clients_of_other_servers_send(server, fields):
    assert server.post("/v1/chat/completions", **{"messages": say("hi")} | fields).status_code == 200


HERMES = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}{{ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hermes")
    (folder / "hermes.jinja").write_text(HERMES)
    with answering(folder, {}, chat_template=str(folder / "hermes.jinja")) as made:
        yield made


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("text", ["Hello world", f"Let me.\n{CALL}", f"Both.\n{CALL}\n{CALL}"])
def test_an_answer_that_a_client_sends_back_is_the_policys_own_text(text, streams, hermes):
    server, leader = hermes, hermes.leaders[0]
    leader.script, asked_before = Answers(server.tokenizer, {}, text), len(leader.wait_for(0))
    with openai_client(server) as client:
        asked = {"model": "tiny", "messages": say("add"), "tools": TOOLS}
        if streams:
            with client.chat.completions.stream(**asked) as stream:
                answer = stream.get_final_completion().choices[0].message
        else:
            answer = client.chat.completions.create(**asked).choices[0].message
        assert answer.content == text.partition("\n<tool_call>")[0]
        assert len(answer.tool_calls or ()) == text.count("</tool_call>")
        results = [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in answer.tool_calls or ()]
        client.chat.completions.create(**asked | {"messages": [*say("add"), answer.model_dump(), *results, *say("b")]})
        first, second = [each.prompt for each in leader.wait_for(asked_before + 2)[asked_before:]]
        own = [*server.tokenizer.encode(text), server.tokenizer.eos_id]
        assert second[: len(first) + len(own)] == first + own


def test_wishes_to_a_service_change_nothing_in_the_prompt(server):
    plain = server.post("/tokenize", messages=history(), tools=TOOLS).json()["tokens"]
    mark, (tool,) = {"cache_control": {"type": "ephemeral"}}, TOOLS
    for wish in ({"strict": True}, {"strict": False}, {"strict": None}, {"description": None}):
        tools = [{**tool, **mark, "function": {**tool["function"], **wish}}]
        messages = [{**message, **mark} for message in history()]
        assert server.post("/tokenize", messages=messages, tools=tools).json()["tokens"] == plain
    fields = {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "safety_identifier": "me"}
    assert server.post("/v1/chat/completions", messages=say("hi"), tools=TOOLS, **fields).status_code == 200


def test_a_model_by_name(server, client):
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="the model 'a/b' does not exist"):
        client.models.retrieve("a/b")
    assert server.client.get("/v1/models/tiny").json() == server.client.get("/v1/models").json()["data"][0]


def test_an_error_of_a_message_names_its_number(server):
    messages = [*say("a"), {"role": "user", "content": []}]
    error = server.post("/v1/chat/completions", messages=messages).json()["error"]
    assert error["message"].startswith("messages.1.content: ") and error["param"] == "messages"


def test_values_for_the_template(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "t.jinja").write_text("{{ x }}{{ messages[0].reasoning_content }}")
    with served(tmp_path / "s", chat_template=str(tmp_path / "t.jinja")) as server:
        values = {"x": "a<|im_end|>"}
        tokens = server.post("/tokenize", messages=say("hi"), chat_template_kwargs=values).json()["tokens"]
        assert server.tokenizer.decode(tokens) == "a<|im_end|>"
        answer = server.post("/tokenize", messages=say("hi"), chat_template_kwargs={"messages": []})
        assert "'messages' is a field of the request" in answer.json()["error"]["message"]
        thoughts = [{"role": "assistant", "content": "a", "reasoning": "b"}]
        tokens = server.post("/tokenize", messages=thoughts).json()["tokens"]
        assert server.tokenizer.decode(tokens) == "b"


def deep(levels):
    value = {}
    for _ in range(levels):
        value = {"a": value}
    return [{"type": "function", "function": {"name": "f", "parameters": value}}]


@pytest.mark.parametrize("fields, param", [
    (dict(messages=[]), "messages"), (dict(messages=[{"role": "boss", "content": ""}]), "messages"),
    (dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]), "messages"),
    (dict(chat_template="{{ 1 }}"), "chat_template"), (dict(top_logprobs=1), "top_logprobs"),
    (dict(response_format={"type": "json_object"}), "response_format"), (dict(tool_choice="required"), "tool_choice"),
    (dict(tools=deep(100)), "tools"), (dict(tools=deep(5000)), None),
    (dict(max_completion_tokens=0), "max_completion_tokens"),
    (dict(messages=[{"role": "assistant", "content": "", "tool_calls": [
        {"id": "a", "function": {"name": "f", "arguments": "[1]"}}]}]), "messages"),
])  # fmt: skip
def test_wrong_requests_name_their_field(server, fields, param):
    given = {"messages": say("hi")} | fields
    text = "{" + ", ".join(f"{json.dumps(name)}: {dumped(value)}" for name, value in given.items())
    headers = {"Content-Type": "application/json"}
    answer = server.client.post("/v1/chat/completions", content=text + "}", headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def dumped(value):
    """JSON of any depth."""
    try:
        return json.dumps(value)
    except RecursionError:
        inner = '{"a": ' * 5000 + "1" + "}" * 5000
        return f'[{{"type": "function", "function": {{"name": "f", "parameters": {inner}}}}}]'


def test_a_server_without_a_template_says_so(tmp_path):
    with served(tmp_path, chat_template="none") as server:
        answer = server.post("/v1/chat/completions", messages=say("hi"))
        assert answer.status_code == 400 and "no chat template" in answer.json()["error"]["message"]
