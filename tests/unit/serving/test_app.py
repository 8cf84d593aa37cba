"""Routes: the page, texts and tokens, /admin and metrics."""

import httpx

from megarl.serving.app import PAGE
from megarl.serving.replica_messages import Control
from tests.helpers.waiting import SAFETY_SECONDS

ADMIN = {"Authorization": "Bearer root"}


def test_the_page_has_a_strict_policy(server):
    answer = httpx.get(f"{server.url}/", timeout=SAFETY_SECONDS)
    if not PAGE.is_file():
        assert answer.status_code == 404
    else:
        assert answer.headers["content-security-policy"].startswith("default-src 'none';")


def test_tokens_and_text(server):
    tokens = server.post("/tokenize", prompt="Hello <|im_end|>", return_token_strs=True).json()
    assert tokens["tokens"] == server.tokenizer.encode("Hello <|im_end|>") and tokens["max_model_len"] == 4096
    assert "".join(tokens["token_strs"]) == "Hello <|im_end|>" and tokens["count"] == len(tokens["tokens"])
    assert server.post("/detokenize", tokens=tokens["tokens"]).json() == {"prompt": "Hello <|im_end|>"}


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
    assert server.post("/generate", input_ids=[5]).status_code == 200
    assert server.client.get("/nothing").status_code == 404
    text = server.client.get("/metrics").text
    assert 'megarl_requests_total{endpoint="/generate",status="200"}' in text
    assert 'megarl_policy_version{replica="0"}' in text and 'megarl_free_cache_blocks{replica="0"} 50.0' in text
    assert "megarl_time_to_first_token_seconds_bucket" in text and 'endpoint="other",status="404"' in text
