"""A saved response: what there is of it, and which of its turns others continue."""

from megarl.rollout import saved_response
from megarl.rollout.saved_response import TurnCheck
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


class Letters:
    """Stands where `TurnTokens` does: a token is a letter."""

    def shown(self, tokens) -> str:
        return "".join(map(chr, tokens))


def test_texts_stay_in_their_blocks():
    checks = [TurnCheck(3, 3, True, 0.0), TurnCheck(0, 1, False, 0.0)]
    lines = [saved_response.heading(saved()), *saved_response.saved_turns(saved(), Letters(), checks)]
    assert all(line.isprintable() for line in lines)
    assert lines[0] == "step 4, sample 5: line 8, drawn in step 3, number 1 of its group"
    assert [line for line in lines if line.startswith("end: ")] == ["end: length, not solved, rewards 0.5"]
    assert lines[3].endswith(", reward 0.5 | the same tokens and log-probs")
    assert [line for line in lines if line.startswith("turn ")][1] == "turn 2: 1 tokens | other tokens from token 1 on"
    assert lines.count("    end: done, solved, rewards 9") == 2  # of the turn and of the answer
