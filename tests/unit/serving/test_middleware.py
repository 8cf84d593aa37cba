"""What surrounds requests: keys, faults, and bodies that are too complex."""

import httpx
import openai
import pytest

from megarl.serving.middleware import MAX_VALUES, is_plain
from tests.helpers.server.serving import posted, served, without_leaders
from tests.helpers.waiting import SAFETY_SECONDS

ADMIN = {"Authorization": "Bearer root"}


def test_keys(server):
    with httpx.Client(base_url=server.url, timeout=SAFETY_SECONDS) as stranger:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing", "/admin/pause"):
            for given in (None, "Bearer sk-3", "sk-1", b"Bearer \xff"):
                answer = stranger.get(path, headers={"Authorization": given} if given else {})
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert stranger.get("/health").json() == {"status": "alive"}
        assert stranger.get("/v1/models", headers={"Authorization": "bearer sk-2"}).status_code == 200
        assert stranger.get("/v1/models", headers=ADMIN).status_code == 401
    assert server.client.post("/admin/resume").status_code == 401
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_without_keys_there_is_no_admin_and_all_is_open(tmp_path):
    with served(tmp_path) as server:
        assert server.client.post("/admin/resume").status_code == 404
        assert server.client.get("/v1/models").status_code == 200
        assert "/admin/pause" not in server.client.get("/openapi.json").json()["paths"]


def fail(*_):
    raise RuntimeError("secret prompt")


def test_a_fault_is_an_error_answer_and_a_line_without_content(tmp_path, caplog):
    context = without_leaders(tmp_path)
    context.pool.check_room = fail
    answer = posted(context, prompt="a")
    assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"
    assert "RuntimeError at test_middleware.py" in caplog.text and "secret" not in caplog.text + answer.text


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
