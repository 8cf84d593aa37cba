"""OpenAI's responses, with its client."""

from tests.helpers.envs.odd_agents import played_with_a_result


def test_whole_and_streamed_with_a_call_and_its_result(pool):
    played_with_a_result(pool, "responses")
