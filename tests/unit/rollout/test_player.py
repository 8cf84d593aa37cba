"""Which turns of a saved response can get another answer."""

import dataclasses

from megarl.rollout.player import fork_problem
from tests.helpers.rollout.replays import saved


def test_only_a_turn_that_another_one_follows_can_be_forked():
    assert fork_problem(saved(), 0) is None
    for turn in (-1, 1, 2):
        assert fork_problem(saved(), turn) == "another turn follows the turns 1 of this episode"
    agent = saved(record={"key": "3/8/1", "asked": [{}, {}]})
    assert fork_problem(agent, 0) is None
    rows = dataclasses.replace(agent.episode, row_starts=[agent.episode.turns[0][1]])
    assert fork_problem(agent._replace(episode=rows), 0).endswith("the turns none of this episode")
    session = agent._replace(manifest={"step": 4, "environment": "agent-sessions"})
    assert "outside of the run" in fork_problem(session, 0)
    fixed = {**saved().record, "replayable": False}
    assert "not replayable" in fork_problem(saved(record=fixed), 0)
    assert "failed" in fork_problem(saved(episode=dataclasses.replace(rows, end="failed")), 0)
    assert "no environment" in fork_problem(saved(record=None), 0)
