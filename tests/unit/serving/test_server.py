"""The HTTP process: keys, limits, error answers, /generate, /admin, and what it never writes."""

import asyncio
import pickle
import re
import socket
import subprocess
import sys
from multiprocessing.connection import Client
from pathlib import Path

import httpx
import openai
import pytest
from pydantic import ValidationError

from megarl.data.conversations import Encoder, build_encoder
from megarl.data.prompt import Prompt
from megarl.data.tokenizers import build_tokenizer
from megarl.serving import schemas
from megarl.serving.app import PAGE, build_app
from megarl.serving.configuration import FrontendConfig
from megarl.serving.context import ServingContext
from megarl.serving.middleware import MAX_VALUES, is_plain
from megarl.serving.replica_messages import Control
from megarl.serving.responses import GenerateResult
from tests.helpers import small_tokenizers
from tests.helpers.serving import LIMIT, Answers, Served, served


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    (folder / "weights" / "step_9").mkdir(parents=True)
    (folder / "secret").mkdir()
    (folder / "weights" / "link").symlink_to(folder / "secret")
    made = Served(
        folder,
        api_keys=["sk-1", "sk-2"],
        admin_keys=["root"],
        weights_folder=str(folder / "weights"),
        max_body_mb=5000 / 2**20,
    )
    yield made
    made.close()
    assert made.stderr == ""


ADMIN = {"Authorization": "Bearer root"}


def test_keys(server):
    with httpx.Client(base_url=server.url, timeout=LIMIT) as stranger:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing", "/admin/pause"):
            for headers in (
                {},
                {"Authorization": "Bearer sk-3"},
                {"Authorization": "sk-1"},
                {"Authorization": b"Bearer \xff"},
            ):
                answer = stranger.get(path, headers=headers)
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert stranger.get("/health").json() == {"status": "alive"}
        assert stranger.get("/v1/models", headers={"Authorization": "bearer sk-2"}).status_code == 200
        assert stranger.get("/v1/models", headers=ADMIN).status_code == 401
    assert server.client.post("/admin/resume").status_code == 401
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_the_page_has_a_strict_policy(server):
    answer = httpx.get(f"{server.url}/", timeout=LIMIT)
    if not PAGE.is_file():
        assert answer.status_code == 404
    else:
        assert answer.headers["content-security-policy"].startswith("default-src 'none';")


@pytest.mark.parametrize("method, path, options, status", [
    ("GET", "/nothing", {}, 404), ("POST", "/v1/completions/", {}, 404), ("GET", "/v1/completions", {}, 405),
    ("DELETE", "/v1/models", {}, 405), ("OPTIONS", "/v1/completions", {}, 405), ("GET", "/docs", {}, 404),
    ("POST", "/v1/completions", dict(content=b"{}"), 415), ("POST", "/v1/completions", dict(content=b"{}", headers={
        "Content-Type": "text/plain"}), 415), ("POST", "/v1/completions", {}, 400),
    ("POST", "/tokenize", dict(json=[]), 400),
    ("POST", "/v1/completions", dict(content=b"{", headers={"Content-Type": "application/json"}), 400),
    ("POST", "/v1/completions", dict(content=b"\xff", headers={"Content-Type": "application/json"}), 400),
    ("POST", "/v1/completions", dict(content=b"[" * 4000, headers={"Content-Type": "application/json"}), 400),
    ("POST", "/tokenize", dict(content=b'{"prompt": NaN}', headers={"Content-Type": "application/json"}), 400),
    ("POST", "/v1/completions", dict(json={"prompt": "a" * 5000}), 413), ("POST", "/tokenize", dict(json={}), 400),
    ("POST", "/v1/completions", dict(content=(b"a" * 1000 for _ in range(9)), headers={
        "Content-Type": "application/json"}), 413), ("POST", "/detokenize", dict(json={"tokens": [10**6]}), 400),
    ("POST", "/v1/completions", dict(content=b'{"prompt": "a", "seed": ' + b"9" * 4800 + b"}", headers={
        "Content-Type": "application/json"}), 400),
])  # fmt: skip
def test_every_error_is_one_of_openais_objects(server, method, path, options, status):
    answer = server.client.request(method, path, **options)
    assert answer.status_code == status, answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_the_schema_declares_all_errors(server):
    schema = server.client.get("/openapi.json").json()
    for path in schema["paths"].values():
        for operation in path.values():
            assert {"400", "401", "404", "405", "413", "415", "429", "500", "503"} < set(operation["responses"])
            assert "422" not in operation["responses"]
    assert "ValidationError" not in schema["components"]["schemas"]


def test_tokens_and_text(server):
    tokens = server.post("/tokenize", prompt="Hello <|im_end|>", return_token_strs=True).json()
    assert tokens["tokens"] == server.tokenizer.encode("Hello <|im_end|>") and tokens["max_model_len"] == 4096
    assert "".join(tokens["token_strs"]) == "Hello <|im_end|>" and tokens["count"] == len(tokens["tokens"])
    assert server.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": "Hello <|im_end|>"}


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


def test_admin_commands_reach_all_leaders(server):
    for path, frame in (("pause?mode=keep", ("pause", "keep")), ("resume", ("resume", None))):
        answer = server.client.post(f"/admin/{path}", headers=ADMIN)
        assert answer.json() == {"status": "ok", "version": 1, "label": "step_9"}
        sent = server.leaders[0].wait_for(1, Control)[-1]
        assert (sent.command, sent.mode) == frame
    assert server.client.post("/admin/pause?mode=never", headers=ADMIN).status_code == 400
    answer = server.client.post("/admin/weights", headers=ADMIN, json={"path": "step_9"})
    assert answer.status_code == 200
    assert server.leaders[0].wait_for(3, Control)[-1].path.endswith("/weights/step_9")
    numbers = [frame.number for frame in server.leaders[0].wait_for(3, Control)]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    for path in ("../secret", "link", "/etc", "missing", "a\0b", "step_9/../../secret", "x" * 4000):
        answer = server.client.post("/admin/weights", headers=ADMIN, json={"path": path})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "path"


def test_metrics(server):
    text = server.client.get("/metrics").text
    assert 'megarl_requests_total{endpoint="/generate",status="200"}' in text
    assert 'megarl_policy_version{replica="0"}' in text and 'megarl_free_cache_blocks{replica="0"} 50.0' in text
    assert "megarl_time_to_first_token_seconds_bucket" in text and 'endpoint="other",status="404"' in text


def test_without_keys_there_is_no_admin_and_all_is_open(tmp_path):
    with served(tmp_path) as server:
        assert server.client.post("/admin/resume").status_code == 404
        assert server.client.get("/v1/models").status_code == 200
        assert "/admin/pause" not in server.client.get("/openapi.json").json()["paths"]


def test_a_port_in_use_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with served(tmp_path, leaders=0, port=port) as server:
            assert server.exit_status() == 2 and f"--port {port}: cannot listen there" in server.found


def test_strangers_among_the_leaders_change_nothing(tmp_path):
    with served(tmp_path, family="inet", leaders=0, replicas=1) as server:
        with socket.create_connection(server.address), Client(server.address) as stranger:
            stranger.send_bytes(bytes(48))
            with pytest.raises((EOFError, OSError)):
                [stranger.recv_bytes() for _ in range(3)]
            server.connect(0, Answers(server.tokenizer, {}))
            server.wait_ready()
            assert server.post("/v1/completions", prompt="a").status_code == 200
    assert "a connection of the ranks was refused" in server.stderr


def fail(*_):
    raise RuntimeError("secret prompt")


def without_leaders(tmp_path) -> ServingContext:
    path = small_tokenizers.chatml(tmp_path / "tokenizer")
    encoder = Encoder(build_tokenizer("HuggingFaceTokenizer", path))
    return ServingContext(FrontendConfig(encoder, 100, 100, vocab_size=304))


def posted(context: ServingContext, **body) -> httpx.Response:
    async def post():
        transport = httpx.ASGITransport(build_app(context))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/v1/completions", json=body)

    return asyncio.run(post())


def test_a_fault_is_an_error_answer_and_a_line_without_content(tmp_path, caplog):
    context = without_leaders(tmp_path)
    context.pool.check_room = fail
    answer = posted(context, prompt="a")
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert "RuntimeError at test_server.py" in caplog.text and "secret" not in caplog.text + answer.text


@pytest.mark.parametrize("body, status, message", [
    ({"prompt": "a"}, 503, "the server is starting"), ({"prompt": ["a"] * 4096, "n": 2}, 400, "prompts times n"),
    ({"prompt": "a", "n": 10**6}, 400, "n"),
])  # fmt: skip
def test_what_has_no_place_is_refused_before_it_is_tokenized(body, status, message, tmp_path):
    context = without_leaders(tmp_path)
    context.encoder.tokenizer.encode = context.encoder.tokenizer.encode_batch = fail
    answer = posted(context, **body)
    assert answer.status_code == status and answer.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("body, plain", [
    (b'{"prompt": "' + b'[{:,\\":' * MAX_VALUES + b'"}', True), (b"[" + b"1," * 2**21 + b"1]", True),
    (b"[" + b"[]," * (MAX_VALUES - 1) + b"1]", True), (b"[" + b"[]," * MAX_VALUES + b"1]", False),
    (b"{" + b'"a": 1,' * (MAX_VALUES + 1), False), (b'["' + b"[" * 100 + b'"' + b",{}" * MAX_VALUES + b"{}", False),
    (b"[" + b'"",' * (MAX_VALUES + 1), False), (b"[" + b'"\\\\",' * (2 * MAX_VALUES + 1), False), (b"", True),
])  # fmt: skip
def test_bodies_of_too_many_values_are_known_before_they_are_parsed(body, plain):
    assert is_plain(body) == plain


def test_such_a_body_is_refused(tmp_path):
    answer = posted(without_leaders(tmp_path), prompt=[[]] * (MAX_VALUES + 1))
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "too_complex"


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


def test_the_http_process_loads_neither_torch_nor_megatron(tmp_path):
    """Rank 0 sends the tokenizer and the template that it has read."""
    tokenizer = build_tokenizer("HuggingFaceTokenizer", small_tokenizers.llama(tmp_path / "a"))
    encoder = build_encoder(tokenizer, "tokenizer")
    sent = pickle.dumps((FrontendConfig(encoder, 100, 100), encoder.prompt(Prompt(0, "Hello <|eot_id|>"))))
    code = (
        "import pickle, sys, megarl.serving.frontend\n"
        "from megarl.data.prompt import Prompt\n"
        "config, tokens = pickle.load(sys.stdin.buffer)\n"
        "assert config.encoder.prompt(Prompt(0, 'Hello <|eot_id|>')) == tokens\n"
        "print({'torch', 'megatron', 'transformers'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True)
    assert found.stdout == b"set()\n", found.stderr


def paths_of_openais_client() -> list[str]:
    """The paths without parameters that the client's resources ask for."""
    folder = Path(openai.__file__).parent / "resources"
    texts = "".join(file.read_text() for file in sorted(folder.rglob("*.py")))
    return sorted(set(re.findall(r'self\._(?:post|get|get_api_list|delete)\(\s*"(/[^"{?]*)["?]', texts)))


def test_what_is_not_built_of_openais_api_is_said(server):
    asked = paths_of_openais_client()
    assert {"/embeddings", "/responses", "/chat/completions"} <= set(asked)
    built = {"/chat/completions", "/completions", "/models"}
    for path in sorted({*asked, ""} - built):
        for answer in (server.post(f"/v1{path}"), server.client.get(f"/v1{path}?a=b")):
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (404, "not_found_error")
            assert error["message"].startswith(f"'/v1{path}' is not built; of OpenAI's API there are /v1/completions, ")
            assert "/v1/chat/completions" in error["message"]
    error = server.client.get("/embed").json()["error"]
    assert error["message"].startswith("'/embed': no such path; there are /v1/completions, ")
    assert "/admin" not in error["message"]
    answer = server.client.get("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"] == "'GET' '/v1/chat/completions': allowed is POST"
