"""Anthropic's messages, by hand."""

from tests.helpers.envs.odd_agents import played_with_a_result


def test_whole_and_streamed_with_a_call_and_its_result(pool):
    asks = played_with_a_result(pool, "messages")
    assert asks[-1].stops == ("7",)
