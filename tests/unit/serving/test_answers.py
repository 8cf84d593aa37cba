"""An answer is the same, whole or streamed."""

import asyncio
import json

import pytest

from megarl.serving.answers import MIN_LOGPROB, OpenAIAnswer, event, finite
from megarl.serving.responses import ChatCompletionResponse
from megarl.serving.schemas import OpenAIFields
from tests.helpers.server.serving import Answers, answering, openai_client
from tests.helpers.texts.family_templates import FAMILY_TEMPLATES


class Words(OpenAIAnswer):
    """An answer of two choices, word by word."""

    kind, chunk_kind, prefix = "words", "words.chunk", "w"

    async def parts(self):
        for index, text, finish in ((1, "a", None), (0, "b", "stop"), (1, "c", "length")):
            self.generated_tokens += 1
            yield {"index": index, "text": text, "finish_reason": finish}

    def empty_choices(self):
        return [{"index": 0, "text": ""}, {"index": 1, "text": ""}]

    def merge(self, choice, part):
        choice["text"] += part["text"]
        super().merge(choice, part)


def made(**fields) -> Words:
    answer = Words("tiny", OpenAIFields(**fields))
    answer.more, answer.prompt_tokens = {"system_fingerprint": "f"}, 5
    return answer


def test_parts_make_choices():
    whole = asyncio.run(made().whole())
    assert whole["choices"] == [
        {"index": 0, "text": "b", "finish_reason": "stop"}, {"index": 1, "text": "ac", "finish_reason": "length"},
    ]  # fmt: skip
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert list(whole) == ["id", "object", "created", "model", "system_fingerprint", "choices", "usage"]
    assert whole["object"] == "words" and whole["id"].startswith("w-")


def test_a_stream_tells_the_usage_at_its_end_if_it_is_wanted():
    async def chunks(answer):
        return [chunk async for chunk in answer.chunks()]

    plain = asyncio.run(chunks(made()))
    assert [chunk["choices"][0]["text"] for chunk in plain] == ["a", "b", "c"] and "usage" not in plain[0]
    *parts, last = asyncio.run(chunks(made(stream_options={"include_usage": True})))
    assert [chunk["usage"] for chunk in parts] == [None] * 3
    assert last["choices"] == [] and last["usage"]["total_tokens"] == 8 and last["object"] == "words.chunk"


def test_what_json_lacks():
    assert finite(float("-inf")) == MIN_LOGPROB and finite(None) is None and finite(-1.5) == -1.5
    assert event({"a": "\ud800"}, "said") == b'event: said\ndata: {"a":"\\ud800"}\n\n'


THOUGHTS = "<|channel|>analysis<|message|>Let <b>me</b>.<|end|>"
ANSWERS = {
    "call": THOUGHTS
    + '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": "é"}',
    "say": f"{THOUGHTS}<|start|>assistant<|channel|>final<|message|>Hello\n",
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class MarkedAnswers(Answers):
    """Answers in which the strings of special tokens are these tokens."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, ANSWERS)

    def _generate(self, leader, frame):
        said = self.tokenizer.decode(frame.prompt)
        text = next(answer for key, answer in self.answers.items() if said.rfind(f"user{key}") >= 0)
        tokens = [*self.tokenizer.encode_template(text), self.tokenizer.eos_id]
        for number, token in enumerate(tokens):
            leader.tokens([frame.id, [token], [-1.0], None, "stop" if number == len(tokens) - 1 else None])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder, family = tmp_path_factory.mktemp("server"), FAMILY_TEMPLATES["gpt-oss"]
    (folder / "template.jinja").write_text(family.template)
    own = dict(make_tokenizer=family.tokenizer, tool_format=family.form, chat_template=str(folder / "template.jinja"))
    with answering(folder, {}, **own) as made:
        made.leaders[0].script = MarkedAnswers(made.tokenizer)
        yield made


def ask(said, **more):
    return {"messages": [{"role": "user", "content": said}], **more}


@pytest.mark.parametrize("body", [ask("call", tools=TOOLS), ask("say", tools=TOOLS), ask("say"), ask("call")])
def test_answers_and_streams(server, body):
    (choice,) = ChatCompletionResponse.model_validate(
        whole := server.post("/v1/chat/completions", **body).json()
    ).choices
    message = choice.message
    assert message.reasoning_content == "Let <b>me</b>."
    if "tools" in body and "call" in body["messages"][0]["content"]:
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": "é"})
        assert message.content is None and choice.finish_reason == "tool_calls"
    else:
        assert message.tool_calls is None and choice.finish_reason == "stop"
        assert message.content == "Hello\n" or message.content.endswith('<|constrain|>json<|message|>{"a": "é"}')
    deltas = [choice["delta"] for event in server.events("/v1/chat/completions", **body) for choice in event["choices"]]
    for field in ("content", "reasoning_content"):
        joined = "".join(delta.get(field, "") for delta in deltas)
        assert joined == (whole["choices"][0]["message"][field] or "")
    assert sum("reasoning_content" in delta for delta in deltas) > 1


def test_openais_client_goes_on_after_a_call(server):
    with openai_client(server) as client:
        message = client.chat.completions.create(model="tiny", **ask("call", tools=TOOLS)).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
        messages = [*ask("call")["messages"], message.model_dump(exclude_none=True), result]
        messages.append({"role": "user", "content": "say"})
        server.leaders[0].script.answers = dict(reversed(ANSWERS.items()))
        answer = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0]
        assert answer.message.content == "Hello\n" and answer.message.tool_calls is None
