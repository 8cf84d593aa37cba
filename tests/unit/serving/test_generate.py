"""/generate: tokens with log-probs, versions and routes."""

from megarl.serving.responses import GenerateResult
from tests.helpers.server.serving import Answers


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
