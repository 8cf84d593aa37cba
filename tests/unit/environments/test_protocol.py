"""What an environment returns is checked, and one that cannot be replayed is found out."""

import pytest

from tests.helpers.envs.odd_environments import HERE, Wrong


@pytest.mark.parametrize("name", sorted(set(Wrong.ANSWERS) - {"surrogate"}))
def test_wrong_observations_are_failures_that_say_why(name, play):
    plays = play("Wrong", retries=0)
    plays.start(0)
    said = {
        "none": "returned NoneType, not an Observation", "reward": "reward is nan, not a finite number",
        "role": "a message has the role 'assistant'; allowed are user, system, tool",
        "content": "content of a message is int, not text", "messages": "messages are str, not a list",
        "field": "a message is an object with role, content and perhaps tool_call_id and name",
        "parts": "a is 'b', not a finite number", "size": "the messages have 2,000,",
    }  # fmt: skip
    assert plays.step({0: name})[0].failure.startswith(f"ValueError: {HERE}:Wrong: {said[name]}")


def test_an_environment_that_only_says_that_it_can_be_replayed_is_found_out(play):
    plays = play("Unlike", retries=1)
    plays.start(0)
    assert plays.text(0, "a") == "1"
    event = plays.step({0: "b"})[0]
    assert event.failure == "RuntimeError: Unlike: turn 0 was answered differently when replayed"
