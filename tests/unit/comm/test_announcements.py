"""Messages through the process group's store."""

import dataclasses
import itertools
import re

import pytest
import torch.distributed as dist

from megarl.comm import announcements
from megarl.comm.announcements import Announcements, ResponseSender, response_queue
from megarl.groups import PromptGroups
from tests.helpers.programs import inputs, program, rl_argv
from tests.helpers.worlds import run_world


def queue_of_three(rank: int) -> list:
    queue = Announcements("numbers")
    if rank:
        for number in range(3):
            queue.send({"rank": rank, "number": number})
        return []
    found = []
    while len(found) < 6:
        queue.wait()
        found.append(queue.take())
    assert not queue.has_next()
    queue.close()
    store, key = dist.distributed_c10d._get_default_store(), "megarl/numbers/sent"
    assert not store.check([key])
    store.set("megarl/numbers/7", "[")
    queue = Announcements("numbers")
    queue._taken = 6
    with pytest.raises(RuntimeError, match=re.escape("the message megarl/numbers/7 is damaged")):
        queue.take()
    return [(each["rank"], each["number"]) for each in found]


def test_a_queue_gives_each_message_of_several_senders_once_and_in_their_order():
    found = run_world(queue_of_three, 3)[0]
    assert sorted(found) == list(itertools.product((1, 2), range(3)))
    assert all([number for rank, number in found if rank == sender] == [0, 1, 2] for sender in (1, 2))


# -- early responses -----------------------------------------------------------------------------------------------


def responses_of_a_round(rank: int) -> list:
    if rank == 2:  # the rollout
        sender = ResponseSender(5, 0, PromptGroups([2, 2, 2]), replicas=2)
        for sequence in (4, 0, 2, 1, 5, 3, 4):  # the last one again
            sender.send(sequence, None if sequence == 1 else [sequence, 7])
        return []
    queue = response_queue(5, 0, rank)
    found = [queue.take() for _ in range((4, 2)[rank])]
    assert not queue.has_next()
    return [(each["sequence"], each["tokens"]) for each in found]


def test_groups_go_round_robin_to_the_replicas_of_the_judge():
    first, second, _ = run_world(responses_of_a_round, 3)
    assert first == [(4, [4, 7]), (0, [0, 7]), (1, None), (5, [5, 7])] and second == [(2, [2, 7]), (3, [3, 7])]


@pytest.mark.parametrize("changes, ranks, expected", [
    ({}, (range(1), range(1, 2)), True),
    ({}, (range(2), range(1, 2)), False),
    ({"over_sampling": 1.5}, (range(1), range(1, 2)), False),
    ({"max_response_length": announcements.MAX_TOKENS + 1}, (range(1), range(1, 2)), False),
    ({"debug_train_only": True}, (range(1), range(1, 2)), False),
])  # fmt: skip
def test_when_a_judge_reads_early(changes, ranks, expected):
    settings = dataclasses.replace(program("rl", rl_argv(inputs() / "run"), 1).settings, **changes)
    assert announcements.judges_early(settings, True, *ranks) == expected
    assert not announcements.judges_early(settings, False, *ranks)
