"""OpenAI's chat completions, with its client."""

from tests.helpers.envs.odd_agents import CALL, play


def test_whole_streamed_and_several_choices(pool):
    event, asks = play(pool, "chats", [CALL, CALL])
    assert event.failure is None and event.is_agent and event.observation.done, event.failure
    assert event.observation.reward == 0.5 and len(asks) == 4
    assert asks[-1].stops == ("7", "8")
