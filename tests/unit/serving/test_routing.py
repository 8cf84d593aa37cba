"""The choice of the replica."""

from megarl.serving import routing
from megarl.serving.routing import ReplicaRouter

LONG = list(range(100))


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
    monkeypatch.setattr(routing, "MAX_SESSIONS", 2)
    monkeypatch.setattr(routing, "MAX_BLOCKS", 4)
    router = ReplicaRouter()
    for number in range(50):
        router.choose([number] * 64, str(number), {0: 0, 1: 1})
    assert len(router._sessions) == 2 and len(router._blocks) == 4
