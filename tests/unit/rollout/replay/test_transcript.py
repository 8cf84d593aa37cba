"""A saved response as text for a terminal: whatever a policy or an environment wrote, it stays inside its block."""

from megarl.rollout.replay import transcript
from megarl.rollout.replay.player import TurnCheck
from tests.helpers.rollout.replays import saved


class Letters:
    """Stands where `TurnTokens` does: a token is a letter."""

    def shown(self, tokens) -> str:
        return "".join(map(chr, tokens))


def test_texts_stay_in_their_blocks():
    checks = [TurnCheck(3, 3, True, 0.0), TurnCheck(0, 1, False, 0.0)]
    lines = [transcript.heading(saved()), *transcript.saved_turns(saved(), Letters(), checks)]
    assert all(line.isprintable() for line in lines)
    assert lines[0] == "step 4, sample 5: line 8, drawn in step 3, number 1 of its group"
    assert [line for line in lines if line.startswith("end: ")] == ["end: length, not solved, rewards 0.5"]
    assert lines[3].endswith(", reward 0.5 | the same tokens and log-probs")
    assert [line for line in lines if line.startswith("turn ")][1] == "turn 2: 1 tokens | other tokens from token 1 on"
    assert lines.count("    end: done, solved, rewards 9") == 2  # of the turn and of the answer
