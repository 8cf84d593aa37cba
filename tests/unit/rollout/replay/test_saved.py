"""A saved response: what there is of it, and which of its turns others continue."""

from tests.helpers.rollout.replays import saved


def test_turns_are_continued_by_an_answer_or_by_a_row_that_begins_with_them():
    found = saved()
    (seen,) = found.observations
    assert not found.is_agent and found.continued_turns() == [0] and seen.reward == 0.5
    ended = found.record | {"observations": [found.record["observations"][0] | {"done": True}]}
    assert saved(record=ended).continued_turns() == []
    agent = saved(record={"key": "3/8/1", "asked": [{}, {}]})
    assert agent.is_agent and agent.observations == [] and agent.continued_turns() == [0]
    assert saved(record=None).continued_turns() == []
