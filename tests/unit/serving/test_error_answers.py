"""Every error is one of OpenAI's objects, and says what is there instead."""

import re
from pathlib import Path

import openai
import pytest

ADMIN = {"Authorization": "Bearer root"}


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
