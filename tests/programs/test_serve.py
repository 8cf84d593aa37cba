"""The generation server: the bits of the generator in this process, whoever asks, in whatever layout; and images."""

import base64
import functools
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
import torch
from PIL import Image

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.data.images.decoding import decode
from megarl.mcore.inference.generation import GenerationRequest
from megarl.serving.sampling import stream_key
from tests.helpers.evaluation import evaluate_argv
from tests.helpers.folders import any_types
from tests.helpers.forked_programs import error_line, launch
from tests.helpers.pages import documents
from tests.helpers.programs import ROOT, inputs
from tests.helpers.server.server_clients import ServerClient, completions_of
from tests.helpers.server.servers import (
    ADMIN_KEY,
    API_KEY,
    MOE,
    SERVED,
    checkpoint,
    completions,
    key_files,
    requests,
    scores,
    serve_argv,
    served,
    small_argv,
)
from tests.helpers.texts.picture_prompts import encoded
from tests.helpers.tiers import by_default
from tests.helpers.worlds import SAFETY_SECONDS, run_world
from tools import make_number_pictures as numbers

LAYOUTS = {"one rank": (1, ""), "two replicas": (2, ""), "TP 2": (2, "--tensor-model-parallel-size 2")}


@pytest.fixture(scope="module", params=by_default(LAYOUTS, ("two replicas",)))
def server(request):
    """A server in each layout, with keys, and the answers of the generator in this process."""
    size, flags = LAYOUTS[request.param]
    keys = f"--api-key-file {key_files()['api']}"
    # The log-probs of tensor-parallel ranks have roundings of their own, the tokens are those of one rank.
    expected = completions(small_argv(flags), requests(), size)
    assert [c.tokens for c in expected] == [c.tokens for c in completions(small_argv(), requests())]
    with served(small_argv(f"{flags} {keys}"), size) as running:
        yield running, expected, functools.partial(scores, small_argv(flags), size=size)


def client_of(running) -> openai.OpenAI:
    return openai.OpenAI(base_url=running.url + "/v1", api_key=API_KEY, max_retries=0, timeout=SAFETY_SECONDS)


def remote(running, **more) -> ServerClient:
    return ServerClient(running.url, API_KEY, seconds=SAFETY_SECONDS, **more)


def test_the_requests_of_the_page_are_answered(server):
    """docs/serving.md's, with the port, the key and the model's name of this server."""
    running, _, _ = server
    shell, code = documents.blocks(documents.text_of(ROOT / "docs" / "serving.md"))[:2]
    names = {"http://localhost:8000": running.url, 'model="ppo"': f'model="{running.model}"', '"any"': f'"{API_KEY}"'}
    python = functools.reduce(lambda text, name: text.replace(name, names[name]), names, code.text)
    assert all(name in code.text for name in names)
    found: dict = {}
    exec(python, found)
    assert 0 < found["answer"].usage.completion_tokens <= 4
    path, body = re.search(r"localhost:8000(\S+) .*-d '(.*)'", shell.text, re.DOTALL).groups()
    answers = [running.post(path, json.loads(body), authorization=f"Bearer {API_KEY}") for _ in range(2)]
    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]  # of temperature 0


# -- the same bits -----------------------------------------------------------------------------------------------


def test_every_layout_answers_as_the_generator_in_this_process(server):
    running, expected, _ = server
    generator = remote(running)
    whole = generator.generate(requests())
    assert whole == expected and len({len(completion.tokens) for completion in whole}) > 5
    for found, here in zip(whole, expected, strict=True):
        # Routes and versions aside, so are the most likely tokens; `==` leaves them out.
        assert (found.top_logprobs or None) == (here.top_logprobs or None)
    streamed = list(generator.stream(requests()))
    assert completions_of(streamed, len(requests())) == expected and len(streamed) > 2 * len(requests())
    assert generator.generate(requests()[7:8]) == expected[7:8]  # alone


def test_a_seed_gives_one_answer_alone_and_among_many_clients(server):
    running, *_, here = server
    client = client_of(running)

    def ask(seed: int, **more):
        return client.completions.create(model=running.model, prompt="7+5=", max_tokens=30, seed=seed, n=2, **more)

    alone = [[choice.text for choice in ask(seed).choices] for seed in range(3)]
    with ThreadPoolExecutor(64) as pool:
        crowd = list(pool.map(lambda i: ask(i % 3), range(64)))
    assert all([choice.text for choice in found.choices] == alone[i % 3] for i, found in enumerate(crowd))
    assert len({text for texts in alone for text in texts}) == 6
    prompt = running.post("/tokenize", {"prompt": "7+5="}, authorization=f"Bearer {API_KEY}").json()["tokens"]
    request = GenerationRequest(prompt, stream_key(1, 0, 1), 30, SamplingSettings(), tuple(ends(running)))
    (found,) = remote(running).generate([request])
    text = running.post("/detokenize", {"tokens": found.tokens}, authorization=f"Bearer {API_KEY}").json()["prompt"]
    assert text == alone[1][1]
    parts: dict[int, str] = {0: "", 1: ""}
    for chunk in ask(1, stream=True):
        parts[chunk.choices[0].index] += chunk.choices[0].text
    assert [parts[0], parts[1]] == alone[1]


def ends(running) -> list[int]:
    from megarl.data.tokenizers import build_tokenizer

    return list(build_tokenizer("SentencePieceTokenizer", str(inputs() / "tokenizer.model")).end_ids)


def test_the_tokens_of_an_answer_have_the_same_log_probs_when_they_are_sent_back(server):
    running, *_, here = server
    client, tokens = client_of(running), [5, 4, 9]
    found = remote(running).generate([GenerationRequest(tokens, 11, 40, SamplingSettings(), (), 2)])[0]
    again = client.completions.create(
        model=running.model, prompt=[*tokens, *found.tokens], echo=True, logprobs=2, max_tokens=1, temperature=1, seed=0
    )
    echoed = again.choices[0].logprobs
    assert echoed.token_logprobs[0] is None and echoed.token_logprobs[3:-1] == found.logprobs
    best = [[value for _, value in top] for top in found.top_logprobs]
    assert [sorted(top.values(), reverse=True)[:2] for top in echoed.top_logprobs[3:-1]] == best
    (local,) = here([[*tokens, *found.tokens]])
    assert local.logprobs == echoed.token_logprobs[:-1]


@pytest.mark.long
def test_experts_and_their_routes():
    path = checkpoint(MOE)
    served_flags = SERVED + " --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
    expected = completions(serve_argv(served_flags, path), requests())
    routed = GenerationRequest([3, 4, 5], 4, 9, SamplingSettings(), ())
    (with_routes,) = completions(serve_argv(served_flags, path), [routed], routes=True)
    for size, flags in ((1, ""), (2, "--expert-model-parallel-size 2")):
        with served(serve_argv(f"{served_flags} --serve-routes {flags}", path), size) as running:
            generator = ServerClient(running.url)
            assert generator.generate(requests()) == expected
            body = {"input_ids": routed.prompt, "key": routed.key, "return_routes": True}
            settings = {"max_tokens": routed.max_new_tokens, "ignore_eos": True}
            found = running.post("/generate", {**body, "sampling_params": settings}).json()["routes"]
            read = torch.frombuffer(bytearray(base64.b64decode(found["data"])), dtype=torch.int16).view(found["shape"])
            assert torch.equal(read, with_routes.routes) and found["shape"] == [12, 2, 2]
            echo = {"prompt": [3, 4, 5], "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0}
            assert len(running.post("/v1/completions", echo).json()["choices"][0]["logprobs"]["token_logprobs"]) == 3


def save_modules(_, folders: dict):
    for seed, folder in folders.items():
        any_types.save("gemma4_text", folder, seed)


def own_logprobs(_, seed: int, prompt: list[int], response: list[int]) -> torch.Tensor:
    """What the module of a seed computes of a response."""
    module, tokens = any_types.small_module("gemma4_text", seed), torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        logprobs = module(tokens).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0]


@pytest.mark.long
def test_a_module_of_transformers_answers_as_it_does_alone(tmp_path):
    """Before and after new weights; the second of two equal prompts reads cached keys."""
    folders = {seed: tmp_path / name for seed, name in enumerate(("old", "new"))}
    flags = "--model-source transformers --max-prompt-length 100 --max-response-length 24 --rollout-buffer-gb 0.01"
    keys = f"--admin-key-file {key_files()['admin']} --weights-folder {tmp_path} --rollout-prefix-caching"
    prompt, settings = [5 + i % 90 for i in range(70)], {"max_tokens": 24, "ignore_eos": True}
    run_world(save_modules, 1, folders)
    with served(f"--hf-model {folders[0]} --port 0 {flags} {keys}".split()) as running:
        for seed in folders:
            if seed == 1:
                key = f"Bearer {ADMIN_KEY}"
                assert running.post("/admin/weights", {"path": "new"}, authorization=key).status == 200
            body = {"input_ids": prompt, "seed": 3, "sampling_params": settings}
            first, again = (running.post("/generate", body).json() for _ in range(2))
            assert first["output_ids"] == again["output_ids"] and first["logprobs"] == again["logprobs"]
            (expected,) = run_world(own_logprobs, 1, seed, prompt, first["output_ids"])
            torch.testing.assert_close(torch.tensor(first["logprobs"]), expected, atol=2e-5, rtol=0)


# -- wrong input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "says"), [
    ("--host 0.0.0.0", "--host 0.0.0.0: others can reach it; needs --api-key-file"),
    ("--host example.invalid", "--host example.invalid: others can reach it"),
    ("--api-key-file nowhere", "--api-key-file nowhere: cannot be read"),
    ("--api-key-file SHORT", "a key has fewer than 16 characters"),
    ("--api-key-file EMPTY", "has no key"),
    ("--weights-folder nowhere", "--weights-folder nowhere: no such folder"),
    ("--weights-folder .", "--weights-folder .: needs --admin-key-file"),
    ("--serve-routes", "--serve-routes: needs a model with experts"),
    ("--tool-call-parser a.b:c", "--tool-call-parser a.b:c: a server has auto, hermes, qwen3-coder"),
    ("--port 70000", "--port 70000: allowed is 0 to 65535"),
    ("--served-model-name a&b", "--served-model-name a&b: allowed is letters"),
    ("--max-choices 0", "--max-choices 0"),
])  # fmt: skip
def test_wrong_flags_end_with_one_line(tmp_path, flags, says):
    (tmp_path / "short").write_text("secret\n")
    (tmp_path / "empty").write_text("\n\n")
    flags = flags.replace("SHORT", str(tmp_path / "short")).replace("EMPTY", str(tmp_path / "empty"))
    assert says in error_line(launch(tmp_path, serve_argv(flags), "serve"))


def test_a_port_in_use_ends_with_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, _, err = launch(tmp_path, serve_argv(f"--port {taken.getsockname()[1]}"), "serve")
    assert status == 2 and "cannot listen there" in err.splitlines()[-1]


def test_a_client_says_what_is_wrong_with_its_server(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(RuntimeError, match="no answer"):
        ServerClient(f"http://127.0.0.1:{port}", seconds=5).generate(requests()[:1])
    argv = evaluate_argv(None, "--rollout-server http://x")
    assert "has the weights; leave it out" in error_line(launch(tmp_path, argv, "evaluate"))


def greedy_of_transformers(rank: int, folder, pictures: list[bytes]) -> list[str]:
    """Its greedy answers about images after the prompt that the template writes."""
    return [_answer(folder, data) for data in pictures]


def _answer(folder, data: bytes) -> str:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    settings = {name: value for name, value in numbers.PROCESSOR.items() if name != "image_processor_type"}
    inputs = transformers.Qwen2VLImageProcessorPil(**settings)(images=[decode(data)], return_tensors="pt")
    place = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "number?"}]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    rows = int(inputs["image_grid_thw"].prod()) // 4
    ids = torch.tensor([tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * rows))["input_ids"]])
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        answer = model.generate(
            input_ids=ids, mm_token_type_ids=(ids == place).long(), max_new_tokens=6, do_sample=False, **inputs
        )
    return tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True)


@pytest.mark.long
def test_answers_are_those_of_transformers(tmp_path):
    folder, random = tmp_path / "model", np.random.default_rng(0)
    numbers.write_model(folder, 1)
    pictures = [encoded(Image.fromarray(numbers.draw(number, 30, random))) for number in ("07", "58", "93")]
    argv = ["--hf-model", str(folder), "--max-prompt-length", "64", "--max-response-length", "8", "--port", "0"]

    def ask(server, url: str):
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "number?"}]
        body = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 6, "ignore_eos": True}
        return server.post("/v1/chat/completions", body)

    with served(argv) as server:
        answers = []
        for data in (*pictures, pictures[0]):
            answer = ask(server, "data:image/png;base64," + base64.b64encode(data).decode()).json()
            assert answer["usage"]["prompt_tokens"] == 19  # 8 of them of the image
            answers.append(answer["choices"][0]["message"]["content"])
        refused = ask(server, "http://127.0.0.1/x.png")
    assert refused.status == 400 and "nothing is downloaded" in refused.json()["error"]["message"]
    assert answers == run_world(greedy_of_transformers, 1, folder, [*pictures, pictures[0]])[0]
    assert len(set(answers)) > 1  # it looks at them
