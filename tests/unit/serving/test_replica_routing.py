"""Whose request is next: clients take turns, whatever comes and goes meanwhile. The choice of the replica."""

import contextvars

import pytest

from megarl.serving import replica_routing
from megarl.serving.replica_routing import FairQueue, ReplicaRouter

LONG = list(range(100))


def add(queue: FairQueue, client: bytes, *numbers: int):
    """Adds requests of a client, as its task would."""

    def in_its_task():
        replica_routing.client.set(client)
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


# -- replicas ----------------------------------------------------------------------------------------------------------


def test_sessions_then_prompts_then_load():
    router = ReplicaRouter()
    assert router.choose(LONG, "a", {0: 0, 1: 0}) == 0
    assert router.choose([7] * 40, None, {0: 1, 1: 0}) == 1
    assert router.choose(LONG[:50], None, {0: 9, 1: 1}) == 0  # it knows three blocks of the prompt
    assert router.choose([7] * 40, "a", {0: 9, 1: 1}) == 0  # the session
    assert router.choose([7] * 40, "a", {1: 1}) == 1  # the session's replica has no room
    assert router.choose([7] * 40, "a", {0: 0, 1: 1}) == 1  # the session has moved
    assert router.choose([1], None, {0: 3, 1: 2}) == 1
    assert router.choose(LONG, None, {0: 40, 1: 1}) == 1  # too busy to attract more


def test_the_longest_shared_prompt_counts():
    router = ReplicaRouter()
    router.choose(LONG[:32], None, {0: 0})
    router.choose(LONG[:64] + [5] * 16, None, {1: 0})
    assert router.choose(LONG, None, {0: 0, 1: 9}) == 1
    router.forget()
    assert router.choose(LONG, None, {0: 0, 1: 9}) == 0


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(replica_routing, "MAX_SESSIONS", 2)
    monkeypatch.setattr(replica_routing, "MAX_BLOCKS", 4)
    router = ReplicaRouter()
    for number in range(50):
        router.choose([number] * 64, str(number), {0: 0, 1: 1})
    assert len(router._sessions) == 2 and len(router._blocks) == 4
