"""Responses of a round on their way to a judge's replicas, and when a judge reads them early.

Judges and programs that read early are in tests/unit/roles/test_judge_requests.py.
"""

import dataclasses

import pytest

from megarl.comm import early_responses
from megarl.comm.early_responses import ResponseReceiver, ResponseSender
from megarl.groups import PromptGroups
from tests.helpers.programs import inputs, program, rl_argv
from tests.helpers.worlds import run_world


def responses_of_a_round(rank: int) -> list:
    if rank == 2:  # the rollout
        sender = ResponseSender(5, 0, PromptGroups([2, 2, 2]), replicas=2)
        for sequence in (4, 0, 2, 1, 5, 3, 4):  # the last one again
            sender.send(sequence, None if sequence == 1 else [sequence, 7])
        return []
    receiver, found = ResponseReceiver(5, 0, PromptGroups([2, 2, 2]), 2, rank), []
    while not receiver.is_done:
        receiver.wait()
        found += receiver.receive()
    assert receiver.receive() == []
    receiver.wait(0.0)
    return found


def test_groups_go_round_robin_to_the_replicas_of_the_judge():
    first, second, _ = run_world(responses_of_a_round, 3)
    assert first == [(4, [4, 7]), (0, [0, 7]), (1, None), (5, [5, 7])] and second == [(2, [2, 7]), (3, [3, 7])]


@pytest.mark.parametrize("changes, ranks, expected", [
    ({}, (range(1), range(1, 2)), True),
    ({}, (range(2), range(1, 2)), False),
    ({"over_sampling": 1.5}, (range(1), range(1, 2)), False),
    ({"max_response_length": early_responses.MAX_TOKENS + 1}, (range(1), range(1, 2)), False),
    ({"debug_train_only": True}, (range(1), range(1, 2)), False),
])  # fmt: skip
def test_when_a_judge_reads_early(changes, ranks, expected):
    settings = dataclasses.replace(program("rl", rl_argv(inputs() / "run"), 1).settings, **changes)
    assert early_responses.judges_early(settings, True, *ranks) == expected
    assert not early_responses.judges_early(settings, False, *ranks)
