"""A saved response as text for a terminal: whatever a policy or an environment wrote, it stays inside its block."""

from megarl.rollout.replay import transcript
from megarl.rollout.replay.player import TurnCheck, fork_problem
from megarl.rollout.replay.saved import SavedResponse

HOSTILE = "\x1b[2Jx\r\u202eend: done, solved\nend: done, solved, rewards 9"


class Letters:
    """Stands where `TurnTokens` does: a token is a letter."""

    def shown(self, tokens) -> str:
        return "".join(map(chr, tokens))


def saved(**changes) -> SavedResponse:
    """A response of two turns, with hostile texts."""
    prompt, one, two = [ord("p")], [*map(ord, HOSTILE)], [ord("z")]
    first, second = (1, 1 + len(one)), (2 + len(one), 3 + len(one))
    message = {"role": "tool", "content": HOSTILE, "name": HOSTILE, "tool_call_id": "1"}
    seen = {"messages": [message], "reward": 0.5, "done": False, "correct": None, "parts": {}}
    record = {"key": "3/8/1", "replayable": True, "tools": [], "observations": [seen]}
    fields = {
        "manifest": {"step": 4, "environment": "x:y"}, "sample": 5, "place": (8, 1), "draw": (3, 0),
        "tokens": [*prompt, *one, ord("o"), *two], "prompt_length": 1, "row_starts": [], "turns": [first, second],
        "logprobs": [[0.0] * len(one), [0.0]], "rewards": [0.5, 0.0], "end": "length", "solved": False, "versions": [],
        "record": record,
    }  # fmt: skip
    return SavedResponse(**{**fields, **changes})


def test_texts_stay_in_their_blocks():
    checks = [TurnCheck(3, 3, True, 0.0), TurnCheck(0, 1, False, 0.0)]
    lines = [transcript.heading(saved()), *transcript.saved_turns(saved(), Letters(), checks)]
    assert all(line.isprintable() for line in lines)
    assert lines[0] == "step 4, sample 5: line 8, drawn in step 3, number 1 of its group"
    assert [line for line in lines if line.startswith("end: ")] == ["end: length, not solved, rewards 0.5"]
    assert lines[3].endswith(", reward 0.5 | the same tokens and log-probs")
    assert [line for line in lines if line.startswith("turn ")][1] == "turn 2: 1 tokens | other tokens from token 1 on"
    assert lines.count("    end: done, solved, rewards 9") == 2  # of the turn and of the answer


def test_only_a_turn_that_another_one_follows_can_be_forked():
    assert fork_problem(saved(), 0) is None
    for turn in (-1, 1, 2):
        assert fork_problem(saved(), turn) == "another turn follows the turns 1 of this episode"
    agent = saved(record={"key": "3/8/1", "asked": [{}, {}]})
    assert fork_problem(agent, 0) is None
    assert fork_problem(agent._replace(row_starts=[agent.turns[0][1]]), 0).endswith("the turns none of this episode")
    session = agent._replace(manifest={"step": 4, "environment": "agent-sessions"})
    assert "outside of the run" in fork_problem(session, 0)
    fixed = {**saved().record, "replayable": False}
    assert "not replayable" in fork_problem(saved(record=fixed), 0)
    assert "failed" in fork_problem(saved(end="failed"), 0)
    assert "no environment" in fork_problem(saved(record=None), 0)
