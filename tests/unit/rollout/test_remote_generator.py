"""The client of a generation server: what it asks, when it asks again, and what it says of wrong answers."""

import json
from types import SimpleNamespace

import pytest

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.errors import UsageError
from megarl.mcore.inference.generation import GenerationRequest
from megarl.rollout import remote_generator
from megarl.rollout.remote_generator import BATCH, RemoteGenerator, request_body
from tests.helpers.evaluation import evaluate_argv, run_evaluate
from tests.helpers.programs import inputs
from tests.helpers.server.servers import (
    serve_argv,
    served,
)
from tests.helpers.tiers import by_default

URL = "http://host:8000"
ANSWER = {"output_ids": [7], "logprobs": [-1.0], "finish_reason": "stop", "versions": [3]}


def request(key: int, prompt=(1, 2), limit: int = 4, **sampling) -> GenerationRequest:
    return GenerationRequest(list(prompt), key, limit, SamplingSettings(**sampling), (5,))


class Server:
    """In place of the connections: answers each request by the next of `answers`, at the end as a server would."""

    def __init__(self, answers=()):
        self.answers, self.asked = list(answers), []

    def request(self, method, url, json=None, headers=None, timeout=None):
        self.asked.append((method, url, json, headers))
        usual = response(200, [ANSWER | {"output_ids": [key]} for key in json["key"]])
        return self.answers.pop(0) if self.answers else usual


def response(status: int, body, **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return SimpleNamespace(status=status, data=data, headers=headers)


def client(monkeypatch, *answers, seconds: float = 60.0) -> tuple[RemoteGenerator, Server, list[float]]:
    server, slept = Server(answers), []
    monkeypatch.setattr(remote_generator.urllib3, "PoolManager", lambda **_: server)
    monkeypatch.setattr(remote_generator.time, "sleep", slept.append)
    return RemoteGenerator(f"{URL}/", "secret", seconds), server, slept


def test_requests_that_differ_in_prompt_and_key_alone_share_a_body(monkeypatch):
    generator, server, _ = client(monkeypatch)
    requests = [request(i, limit=4 + i % 2) for i in range(2 * BATCH + 6)]
    found = generator.generate(requests)
    assert [completion.tokens for completion in found] == [[i] for i in range(len(requests))]
    sizes = sorted(len(body["key"]) for _, _, body, _ in server.asked)
    assert sizes == [3, 3, BATCH, BATCH]
    assert {(method, url, headers["Authorization"]) for method, url, _, headers in server.asked} == {
        ("POST", f"{URL}/generate", "Bearer secret")
    }


def test_a_body_says_all_that_the_tokens_depend_on():
    body = request_body([request(3, top_k=2, top_p=0.5), request(4, prompt=[9])])
    assert body["input_ids"] == [[1, 2], [9]] and body["key"] == [3, 4]
    wanted = {"temperature": 1.0, "top_k": 2, "top_p": 0.5, "max_tokens": 4, "stop_token_ids": [5], "ignore_eos": True}
    assert body["sampling_params"].items() >= wanted.items()
    assert request_body([request(3, greedy=True)])["sampling_params"]["temperature"] == 0
    with pytest.raises(ValueError, match="needs its own sampling settings"):
        request_body([GenerationRequest([1], 1, 1)])


def test_a_busy_server_is_asked_again_and_later_each_time(monkeypatch):
    busy = [response(429, {}), response(503, {}), response(503, {}, **{"Retry-After": "3"})]
    generator, server, slept = client(monkeypatch, *busy)
    assert generator.generate([request(1)])[0].versions == [3]
    assert slept == [0.2, 0.4, 3.0] and len(server.asked) == 4


@pytest.mark.parametrize("answer, kind, says", [
    (response(400, {"error": {"message": "too long"}}), UsageError, "status 400: too long"),
    (response(500, {"error": {"message": "broken"}}), RuntimeError, "status 500: broken"),
    (response(500, b"<html>"), RuntimeError, "status 500: the answer is not one of a generation server"),
    (response(200, b"<html>"), RuntimeError, "the answer is not one of a generation server"),
    (response(200, []), RuntimeError, "the answer is not one of a generation server"),
    (response(503, {}, **{"Retry-After": "1e9"}), RuntimeError, "status 503: "),
])  # fmt: skip
def test_what_is_wrong_is_said(answer, kind, says, monkeypatch):
    generator, *_ = client(monkeypatch, answer, seconds=1.0)
    with pytest.raises(kind, match=f"^--rollout-server {URL}: {says}"):
        generator.generate([request(1)])


@pytest.mark.parametrize("text, says", [("", "has no key"), ("\u00e9", "has no key"), (None, "cannot be read")])
def test_wrong_key_files_are_refused(text, says, tmp_path):
    path = tmp_path / "key"
    if text is not None:
        path.write_text(text)
    settings = SimpleNamespace(rollout_server=URL, rollout_server_key_file=str(path))
    with pytest.raises(UsageError, match=f"^--rollout-server-key-file {path}: {says}"):
        RemoteGenerator.of_settings(settings)


EPISODES = "--environment tests.helpers.envs.{} --max-turns 3 --max-turn-length 4 --max-response-length 18"


EVALUATED = {  # flags of an evaluation that asks a server
    "one turn": "--top-k 5", "stop strings": '--stop ["7","1+"] --stop-token-ids 6',
    "an environment": EPISODES.format("sum_environments:Sums"), "an agent": EPISODES.format("agents:late_sums"),
    "an agent with its own stop strings": EPISODES.format("agents:stopping"),
    "files with limits and rewards": "--evals short=FOLDER/short.yaml",
    "files with environments": EPISODES.format("sum_environments:Sums") + " --evals played=FOLDER/played.yaml",
}  # fmt: skip


@pytest.mark.parametrize("case", by_default(EVALUATED, ("an agent with its own stop strings",)))
def test_evaluate_gives_the_same_bytes_with_a_server(case, tmp_path):
    flags = f"--eval-responses 2 --eval-temperature 0.8 {EVALUATED[case].replace('FOLDER', str(tmp_path))}"
    entry = f"{{}}:\n  prompts: {inputs() / 'heldout.jsonl'}\n  {{}}\n"
    short = entry.format("a", "max-response-length: 2") + entry.format("b", "reward: length+exact-match")
    played = entry.format("a", "environment: tests.helpers.envs.agents:sums") + entry.format(
        "b", "max-prompt-length: 6"
    )
    (tmp_path / "short.yaml").write_text(short)
    (tmp_path / "played.yaml").write_text(played)
    run_evaluate(evaluate_argv(tmp_path / "own", flags))
    with served(serve_argv("--max-response-length 40")) as running:
        argv = evaluate_argv(tmp_path / "remote", f"{flags} --rollout-server {running.url}")
        at = argv.index("--load")
        run_evaluate(argv[:at] + argv[at + 2 :], 2)
        own, other = ((tmp_path / name / "samples.jsonl").read_bytes() for name in ("own", "remote"))
        assert own == other
    results = [json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("own", "remote")]
    assert results[0]["metrics"] == results[1]["metrics"] and results[1]["rollout_server"].startswith("http://127")
