"""OpenAI's chat completions, with its client."""

from tests.helpers.envs.odd_agents import CALL, played


def test_whole_streamed_and_several_choices(pool):
    asks = played(pool, "chats", [CALL, CALL], reward=0.5)
    assert len(asks) == 4 and asks[-1].stops == ("7", "8")
