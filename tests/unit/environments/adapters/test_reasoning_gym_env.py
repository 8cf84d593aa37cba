"""Tasks of reasoning-gym with several tries, scored by the package's own scorers in a confined process."""

import pytest

from megarl.environments.adapters.reasoning_gym_env import ReasoningGymEnvironment
from megarl.environments.protocol import Task
from tests.helpers.envs.played_environments import check_replay, play, said, written

SUM = {"source_dataset": "chain_sum", "source_index": 0, "expression": "40 + 2"}


def summed(**metadata):
    return Task([{"role": "user", "content": "40 + 2 ="}], "42", {**SUM, **metadata})


def test_wrong_answers_may_be_tried_again():
    first, observations = play(ReasoningGymEnvironment(), summed(), written("41", "<answer>43</answer>", "42"))
    assert first.messages == [] and said(observations) == ["That is wrong. 2 tries are left.",
                                                           "That is wrong. One try is left.", ""]  # fmt: skip
    assert [(o.reward, o.done, o.correct) for o in observations] == [(0.0, False, False)] * 2 + [(1.0, True, True)]
    _, observations = play(ReasoningGymEnvironment(), summed(), written("<answer>42</answer> 7", "never read"))
    assert [(o.reward, o.done) for o in observations] == [(1.0, True)]


def test_the_last_try_counts_and_tries_may_differ():
    _, observations = play(ReasoningGymEnvironment(), summed(), written("", "7", "7", "42"))
    assert [o.done for o in observations] == [False, False, True]
    assert observations[-1].correct is False and observations[-1].reward < 1
    for tries in (1, 5):
        _, observations = play(ReasoningGymEnvironment(2), summed(tries=tries), written(*["7"] * 9))
        assert len(observations) == tries


def test_hostile_answers_are_wrong_answers():
    metadata = {"source_dataset": "n_queens", "board_size": 4, "solutions": [], "puzzle": [], "valid_answers": []}
    task = Task([], "", {**metadata, "tries": 9})
    texts = ["__import__('os').system('false')", "[" * 5000, "\ud800", "9" * 5000, "\0"]
    _, observations = play(ReasoningGymEnvironment(), summed(tries=9), written(*texts))
    assert [o.correct for o in observations] == [False] * 5
    _, observations = play(ReasoningGymEnvironment(), task, written(texts[0]))
    assert observations[0].correct is False


@pytest.mark.parametrize("metadata", [{}, {"source_dataset": ""}, {"source_dataset": 1}, {**SUM, "tries": 0},
                                      {**SUM, "tries": "3"}, {**SUM, "tries": True}])  # fmt: skip
def test_wrong_metadata(metadata):
    with pytest.raises(ValueError, match="metadata"):
        ReasoningGymEnvironment().reset(Task([], "1", metadata))


def test_restored_at_each_turn():
    check_replay(ReasoningGymEnvironment, summed(), written("1", "2", "42"))
