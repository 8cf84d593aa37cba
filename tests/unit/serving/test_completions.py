"""/v1/completions with OpenAI's client and plain HTTP against the real process."""

import json

import openai
import pytest

from megarl.serving.responses import CompletionResponse, GenerateResult
from megarl.serving.sampling import stream_key
from tests.helpers.server.serving import Answers, answering, posted, without_leaders

ANSWERS = {"smile": "a\U0001f600b", "turns": "one\nUser: two", "double": "é" * 5, "list": "1, 2, 3"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with answering(tmp_path_factory.mktemp("server"), ANSWERS) as made:
        yield made


def joined(events):
    """The choices of a stream, joined, by index."""
    merged = {}
    for event in events:
        for part in event["choices"]:
            choice = merged.setdefault(part["index"], {"text": "", "logprobs": None})
            choice["text"] += part["text"]
            if part["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {name: [] for name in part["logprobs"]}
                for name, values in part["logprobs"].items():
                    choice["logprobs"][name] += values
            choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part["stop_reason"]
    return merged


def test_openai_client(client, server):
    answer = client.completions.create(model="tiny", prompt="say", max_tokens=64)
    assert answer.choices[0].text == "Hello world" and answer.choices[0].finish_reason == "stop"
    assert answer.system_fingerprint == "step_7-v0"
    prompt, generated = len(server.tokenizer.encode("say")), len(server.tokenizer.encode("Hello world")) + 1
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, generated, prompt + generated)
    stream = client.completions.create(
        model="tiny", prompt="say", max_tokens=64, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hello world"
    assert chunks[-1].usage == usage and chunks[-2].choices[0].finish_reason == "stop"
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.parametrize("body", [
    {"prompt": "smile"}, {"prompt": "smile", "logprobs": 3}, {"prompt": "turns", "stop": ["\nUser:"], "logprobs": 0},
    {"prompt": "turns", "stop": "\nUser:", "include_stop_str_in_output": True}, {"prompt": "list", "max_tokens": 3},
    {"prompt": ["smile", "list"], "n": 2, "echo": True, "logprobs": 2}, {"prompt": "double", "echo": True},
    {"prompt": [[50, 51], [52]], "echo": True, "max_tokens": 0, "logprobs": 1},
    {"prompt": [60, 61], "echo": True, "max_tokens": 0}, {"prompt": "list", "stop_token_ids": [13], "ignore_eos": True},
])  # fmt: skip
def test_streams_equal_the_whole(server, body):
    whole = server.post("/v1/completions", **body)
    assert whole.status_code == 200, whole.text
    CompletionResponse.model_validate(whole.json())
    events = server.events("/v1/completions", **body)
    expected = {choice.pop("index"): choice for choice in whole.json()["choices"]}
    assert joined(events) == expected


def test_stop_strings_across_tokens_end_the_request(server):
    leader = server.leaders[0]
    before = len(leader.frames)
    choice = server.post("/v1/completions", prompt="turns", stop=["\nUser:"]).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one", "stop", "\nUser:")
    body = {"prompt": "turns", "stop": ["zz", "\nUser:"], "include_stop_str_in_output": True}
    assert server.post("/v1/completions", **body).json()["choices"][0]["text"] == "one\nUser:"
    assert all("\nUser:" not in str(frame) for frame in leader.frames[before:])


def test_a_stop_token_is_not_in_the_text(server):
    comma = server.tokenizer.encode(",")[0]
    choice = server.post("/v1/completions", prompt="list", stop_token_ids=[comma], max_tokens=2).json()["choices"][0]
    frame = server.leaders[0].wait_for(1)[-1]
    assert comma in frame.end_ids and choice["finish_reason"] == "length"


def test_characters_never_come_in_halves(server):
    events = server.events("/v1/completions", prompt="smile")
    assert [part["text"] for event in events for part in event["choices"]] == ["a", "\U0001f600", "b", ""]


def test_logprobs_and_alternatives(server):
    tokens = [*server.tokenizer.encode("a\U0001f600b"), server.tokenizer.eos_id]
    found = server.post("/v1/completions", prompt="smile", logprobs=2).json()["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [Answers.logprob(token) for token in tokens]
    assert found["tokens"][1] == "bytes:\\xf0" and found["tokens"][-1] == "<|im_end|>"
    assert found["text_offset"] == [0, 1, 1, 1, 1, 2, 3] and all(len(top) == 2 for top in found["top_logprobs"])
    chosen = server.post("/v1/completions", prompt="smile", logprobs=0).json()["choices"][0]["logprobs"]
    assert [list(top) for top in chosen["top_logprobs"]] == [[name] for name in chosen["tokens"]]


def test_echo_as_evaluation_harnesses_use_it(server):
    """The request of lm-eval's local-completions, and what it computes from the answer."""
    prompt = server.tokenizer.encode("the user said é")
    body = dict(model="tiny", prompt=[prompt], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234)
    answer = server.post("/v1/completions", **body).json()
    choice = answer["choices"][0]
    assert choice["text"] == "the user said é" + "Hello"[: len(choice["text"]) - 15]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][:-1] == [None, *(Answers.logprob(token) for token in prompt[1:])]
    assert logprobs["top_logprobs"][0] is None and logprobs["tokens"][-3:-1] == ["bytes:\\xc3", "bytes:\\xa9"]
    for token, top in list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))[1:]:
        assert max(top, key=top.get) == token
    assert answer["usage"]["completion_tokens"] == 1
    assert logprobs["text_offset"][:2] == [0, len(logprobs["tokens"][0])]


def test_batches_and_choices_have_their_own_order_and_streams(server):
    first = len(server.leaders[0].wait_for(0))
    answer = server.post("/v1/completions", prompt=["list", "double"], n=2, seed=-5, max_tokens=99).json()
    assert [choice["text"] for choice in answer["choices"]] == ["1, 2, 3"] * 2 + ["é" * 5] * 2
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    frames = server.leaders[0].wait_for(first + 4)[first:]
    assert [frame.key for frame in frames] == [stream_key(-5, p, c) for p in (0, 1) for c in (0, 1)]


def test_sampling_reaches_the_wire(server):
    count = len(server.leaders[0].wait_for(0))
    for fields in (
        dict(temperature=0), dict(temperature=0.5, top_k=-1, top_p=0.9), dict(top_k=7, ignore_eos=True, max_tokens=5),
        dict(temperature=None, max_tokens=None),
    ):  # fmt: skip
        assert server.post("/v1/completions", prompt="a", **fields).status_code == 200
    names = ("temperature", "greedy", "top_k", "top_p", "max_tokens", "end_ids")
    end = [server.tokenizer.eos_id]
    frames = server.leaders[0].wait_for(count + 4)[count:]
    assert [[getattr(frame, name) for name in names] for frame in frames] == [
        [1.0, True, 0, 1.0, 512, end], [0.5, False, 0, 0.9, 512, end], [1.0, False, 7, 1.0, 5, []],
        [1.0, False, 0, 1.0, 512, end],
    ]  # fmt: skip
    assert len({frame.key for frame in frames}) == 4


@pytest.mark.parametrize("fields, param", [
    (dict(max_tokens=0), "max_tokens"), (dict(max_tokens=513), "max_tokens"), (dict(temperature=2.5), "temperature"),
    (dict(temperature=0.001), "temperature"), (dict(frequency_penalty=0.5), "frequency_penalty"), (dict(n=0), "n"),
    (dict(n=129), "n"), (dict(best_of=2), "best_of"), (dict(logit_bias={"5": 1}), "logit_bias"),
    (dict(stop=[""]), "stop"), (dict(prompt=""), "prompt"), (dict(prompt=[]), "prompt"),
    (dict(prompt=[1, "a"]), "prompt"), (dict(logprobs=21), "logprobs"), (dict(prompt=[10**6]), "prompt"),
    (dict(prompt=[-1]), "prompt"), (dict(prompt=[5] * 4096), "prompt"), (dict(prompt="a\ud800"), "prompt"),
    (dict(thinking_budget=0), "thinking_budget"), (dict(thinking_budget_text="</think>"), "thinking_budget_text"),
    (dict(thinking_budget=3, thinking_budget_text="done"), "thinking_budget_text"),
    (dict(thinking_budget=3, thinking_budget_text="a</think>", stop="a"), "stop"),
    (dict(stop=["a"] * 17), "stop"), (dict(made_up=1), "made_up"), (dict(n=True), "n"), (dict(seed=2**63), "seed"),
    (dict(stop_token_ids=[10**6]), "stop_token_ids"), (dict(top_p=0), "top_p"), ({"made\ud800up": 1}, None),
    (dict(prompt=[5] * 4090, max_tokens=10), "max_tokens"),
])  # fmt: skip
def test_wrong_requests_name_their_field(server, fields, param):
    body = json.dumps({"model": "tiny", "prompt": "a", **fields})
    answer = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error" and len(error["message"]) < 500


def test_typed_errors_of_the_client(client):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="a", temperature=3)
    with pytest.raises(openai.NotFoundError, match="'other'"):
        client.completions.create(model="other", prompt="a")


def fail(*_):
    raise RuntimeError("secret prompt")


@pytest.mark.parametrize("body, status, message", [
    ({"prompt": "a"}, 503, "the server is starting"), ({"prompt": ["a"] * 4096, "n": 2}, 400, "prompts times n"),
    ({"prompt": "a", "n": 10**6}, 400, "n"),
])  # fmt: skip
def test_what_has_no_place_is_refused_before_it_is_tokenized(body, status, message, tmp_path):
    context = without_leaders(tmp_path)
    context.encoder.tokenizer.encode = context.encoder.tokenizer.encode_batch = fail
    answer = posted(context, **body)
    assert answer.status_code == status and answer.json()["error"]["message"].startswith(message)


def test_generate_gives_tokens_logprobs_versions_and_routes(server):
    expected = [*server.tokenizer.encode("Hello world"), server.tokenizer.eos_id]
    body = {"input_ids": [5, 6], "key": -7, "return_routes": True, "sampling_params": {"temperature": 0.5}}
    result = server.post("/generate", **body).json()
    GenerateResult.model_validate(result)
    assert result["output_ids"] == expected and result["versions"] == [0] * len(expected)
    assert result["logprobs"] == [Answers.logprob(token) for token in expected]
    assert result["routes"] == {"shape": [1, 1, 1], "data": "AAA="} and result["finish_reason"] == "stop"
    assert [frame.key for frame in server.leaders[0].wait_for(1)][-1] == -7
    events = server.events("/generate", **body)
    assert [token for event in events for token in event["output_ids"]] == expected
    batch = server.post("/generate", input_ids=[[5], [6]], seed=3, return_logprobs=False).json()
    assert [each["index"] for each in batch] == [0, 1] and batch[0]["logprobs"] is None
    assert server.post("/generate", input_ids=[[5], [6]], key=1).status_code == 400
    assert server.post("/generate", input_ids=[5], key=1, seed=1).status_code == 400
