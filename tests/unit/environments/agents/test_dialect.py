"""Errors and streams, as the clients of each dialect read them."""

import json

from megarl.environments.agents.dialect import ANTHROPIC, error_response, streamed
from megarl.serving.error_answers import RequestError


def test_errors_and_events():
    error = RequestError(400, "wrong", "n", "a_code")
    assert json.loads(error_response(error, "/v1/responses").body) == error.content
    of_anthropic = {"type": "error", "error": {"type": "invalid_request_error", "message": "wrong"}}
    assert json.loads(error_response(error, ANTHROPIC).body) == of_anthropic
    body = streamed([{"type": "a"}, {"x": 1}], b"end").body
    assert body == b'event: a\ndata: {"type":"a"}\n\ndata: {"x":1}\n\nend'
