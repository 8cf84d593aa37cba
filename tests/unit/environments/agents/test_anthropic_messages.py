"""Anthropic's messages, with its client where it is installed."""

from tests.helpers.envs.odd_agents import CALL, play


def test_whole_and_streamed_with_a_call_and_its_result(pool):
    event, asks = play(pool, "messages", [CALL, "42", CALL])
    assert event.failure is None and event.is_agent and event.observation.done, event.failure
    assert event.observation.reward == 1.0 and len(asks) == 3
    system, _, turn, result, *_ = asks[1].messages
    assert system == {"role": "system", "content": "be right"} and turn["content"] == "42"
    assert turn["tool_calls"][0]["function"] == {"name": "add", "arguments": {"x": [1, "ä"]}}
    assert (result["role"], result["name"], result["content"]) == ("tool", "add", "43")
    assert asks[1].max_tokens == 9 and asks[1].tools[0]["function"]["name"] == "add"
    assert asks[-1].stops == ("7",)
