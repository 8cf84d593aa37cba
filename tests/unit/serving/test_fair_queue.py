"""Whose request is next: clients take turns, whatever comes and goes meanwhile."""

import contextvars

import pytest

from megarl.serving import fair_queue
from megarl.serving.fair_queue import FairQueue


def add(queue: FairQueue, client: bytes, *numbers: int):
    """Adds requests of a client, as its task would."""

    def in_its_task():
        fair_queue.client.set(client)
        for number in numbers:
            queue.add(number, str(number))

    contextvars.Context().run(in_its_task)


def taken(queue: FairQueue) -> list[int]:
    """All that wait, in the order in which they go out."""
    found = [queue.pop() for _ in range(len(queue))]
    assert all(request == str(number) for number, request in found)
    return [number for number, _ in found]


def test_a_single_request_passes_a_thousand():
    queue: FairQueue = FairQueue()
    add(queue, b"many", *range(1000))
    assert queue.pop()[0] == 0
    add(queue, b"one", 5000)
    add(queue, b"two", 6000, 6001)
    assert len(queue) == 1002
    assert taken(queue) == [1, 5000, 6000, 2, 6001, *range(3, 1000)]


def test_one_client_is_first_come_first_served():
    queue: FairQueue = FairQueue()
    add(queue, b"a", 3, 1)
    add(queue, b"a", 2)
    assert taken(queue) == [3, 1, 2]


def test_what_is_discarded_takes_no_turn():
    queue: FairQueue = FairQueue()
    add(queue, b"a", 1, 2, 3)
    add(queue, b"b", 10)
    add(queue, b"c", 20, 21)
    for number in (1, 10, 20, 99):
        queue.discard(number)
    assert len(queue) == 3
    assert taken(queue) == [2, 21, 3]
    assert not len(queue)
    with pytest.raises(StopIteration):
        queue.pop()
