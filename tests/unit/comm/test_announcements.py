"""Messages through the process group's store."""

import itertools
import re

import pytest
import torch.distributed as dist

from megarl.comm.announcements import MessageQueue
from tests.helpers.worlds import run_world


def queue_of_three(rank: int) -> list:
    queue = MessageQueue("numbers")
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
    queue = MessageQueue("numbers")
    queue._count = 6
    with pytest.raises(RuntimeError, match=re.escape("the message megarl/numbers/7 is damaged")):
        queue.take()
    return [(each["rank"], each["number"]) for each in found]


def test_a_queue_gives_each_message_of_several_senders_once_and_in_their_order():
    found = run_world(queue_of_three, 3)[0]
    assert sorted(found) == list(itertools.product((1, 2), range(3)))
    assert all([number for rank, number in found if rank == sender] == [0, 1, 2] for sender in (1, 2))
