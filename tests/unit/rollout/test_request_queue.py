"""Requests dispatched to replicas during generation: none lost or generated twice, no response depends on it."""

import functools
import itertools
import types

import pytest
import torch
import torch.distributed as dist

from tests.helpers.models.tiny_models import VOCAB, build_stages, parse_roles
from tests.helpers.rollout.engines import LIMIT, NEVER, make_requests, settings_of
from tests.helpers.tiers import long
from tests.helpers.worlds import SAFETY, run_world

END, COUNT = 3, 24
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"


def taken(rank: int, flags: str, unit: int, slow: bool = False, caching: bool = False, end: tuple[int, ...] = (END,)):
    """(this rank's replica, its completions by request, keys left in the store) of a queue shared by all replicas.

    `slow`: the first of two replicas makes its next step only after the other one has made three more or has ended.
    """
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.rollout.request_queue import SharedRequestQueue
    from megarl.rollout.requests import PromptRequest, RoundRequests

    stages, _, place = build_stages(flags)
    engine = RolloutEngine(stages[0], place.pg_collection, VOCAB, 48, 0.005, 4, prefix_caching=caching)
    step = engine.engine.step_modern

    store, waited_for = dist.distributed_c10d._get_default_store(), itertools.count(3, 3)

    def paced():
        if place.dp_rank == 0:
            store.wait([f"step {next(waited_for)}"], SAFETY)
        else:
            store.set(f"step {store.add('steps', 1)}", b"")
        return step()

    if slow:
        engine.engine.step_modern = paced
    requests = enumerate(make_requests(count=COUNT // unit))
    prompts = [PromptRequest(line, request.prompt, unit, LIMIT, 0) for line, request in requests]
    source = SharedRequestQueue(RoundRequests(prompts, 1, 0), unit > 1, place)
    routes = "experts" in flags
    done = dict(engine.stream(source, end, settings_of(), routes, source.share))
    if slow and place.dp_rank == 1:
        for number in range(1000):
            store.set(f"step {number}", b"")
    source.close()
    dist.barrier()
    keys = [source.key, f"{source.key}/done", *source.leases]
    assert len(keys) == 2 + COUNT // unit
    return place.dp_rank, done, [key for key in keys if source.store.check([key])]


def merged(results: list) -> dict:
    """Completions of all replicas by request; ranks of a replica agree, replicas share no request, no key is left."""
    replicas: dict[int, dict] = {}
    for dp_rank, done, keys in results:
        assert replicas.setdefault(dp_rank, done) == done and not keys
    whole = {number: completion for done in replicas.values() for number, completion in done.items()}
    assert len(whole) == sum(map(len, replicas.values())) and sorted(whole) == list(range(COUNT))
    return whole


@functools.cache
def alone(flags: str = "", unit: int = 1) -> dict:
    return merged(run_world(taken, 1, flags, unit))


def assert_same(found: dict, expected: dict):
    for number, completion in found.items():
        assert completion == expected[number]  # tokens, log-probs and how it ended, bit by bit
        if completion.routes is not None:
            assert torch.equal(completion.routes, expected[number].routes)


@pytest.mark.parametrize("size, flags, unit, caching", [
    long((2, "", 1, False)), long((2, "--tensor-model-parallel-size 2", 1, False)),
    (4, "--pipeline-model-parallel-size 2", 3, True), (2, f"{EXPERTS} --expert-model-parallel-size 2", 4, False),
], ids=["two replicas", "one of two ranks", "two of two, by groups", "sharing experts"])  # fmt: skip
def test_dispatch_over_replicas_does_not_change_the_responses(size, flags, unit, caching):
    whole = merged(run_world(taken, size, flags, unit, False, caching))
    if "tensor" in flags:  # sums of another order
        expected = alone()
        assert {n: c.tokens for n, c in whole.items()} == {n: c.tokens for n, c in expected.items()}
    else:
        assert_same(whole, alone(EXPERTS if "experts" in flags else "", unit))
    assert len({len(c.tokens) for c in whole.values()}) > 2, "ragged"


def test_a_slow_replica_takes_fewer_requests():
    results = run_world(functools.partial(taken, end=NEVER), 2, "", 2, True)
    merged(results)
    (slow, fast) = (len(done) for _, done, _ in results)
    assert slow % 2 == fast % 2 == 0 and slow < fast


def queued(rank: int, room: int) -> tuple[list[int], bool]:
    """(what one call takes, whether nothing is left) of groups with 4, 1, 2, 1 and 1 responses."""
    from megarl.comm import role_mesh
    from megarl.rollout.request_queue import SharedRequestQueue
    from megarl.rollout.requests import PromptRequest, RoundRequests

    place = role_mesh.create_mesh(parse_roles("", 1, program="rl"), SAFETY)["rollout"]
    prompts = [PromptRequest(line, [1], samples, LIMIT, 0) for line, samples in enumerate((4, 1, 2, 1, 1))]
    source = SharedRequestQueue(RoundRequests(prompts, 1, 0), True, place)
    found = [number for number, _ in source.take(room)], source.is_empty()
    source.close()
    return found


@pytest.mark.parametrize("room, left", [(9, True), (6, False), (3, False)])
def test_groups_of_unequal_sizes_fill_the_room(room, left):
    """A round that a clock ends takes all that is left at once: a group that stays behind would be lost."""
    assert run_world(queued, 1, room) == [([*range(9)][:room], left)]


class Dies(Exception):
    """A replica's leader that ends where it stands."""


class Interrupted:
    """A store, but for what happens instead of its `number`-th `compare_set`."""

    def __init__(self, store, number, instead):
        self.store, self.left, self.instead = store, number, instead

    def compare_set(self, *entry):
        self.left -= 1
        call = functools.partial(self.store.compare_set, *entry)
        return self.instead(call) if self.left == 0 else call()


def pair_of_queues(monkeypatch) -> list:
    """Those of two replicas of one rank each, with 11 requests in 7 groups and a real store."""
    from megarl.rollout import request_queue
    from megarl.rollout.requests import PromptRequest, RoundRequests

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SAFETY)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(request_queue, "_calls", itertools.repeat(0))
    prompts = [
        PromptRequest(n, [1] * (1 + n % 3), samples, LIMIT, 0) for n, samples in enumerate((3, 1, 2, 1, 1, 2, 1))
    ]
    places = [
        types.SimpleNamespace(dp_rank=n, replicas=((0,), (1,)), is_leader=True, broadcast_object=lambda item: item)
        for n in range(2)
    ]
    return [request_queue.SharedRequestQueue(RoundRequests(prompts, 1, 0), True, place) for place in places]


def drained(queue, room: int = 2) -> list[int]:
    found = []
    while not queue.is_empty():
        found += [number for number, _ in queue.take(room)]
    return found


def owners(queue) -> list[str]:
    return [queue.store.get(key).decode() if queue.store.check([key]) else "" for key in queue.leases]


def requests_of(queue, owned: list[str], replica: str) -> list[int]:
    return [n for ids, owner in zip(queue._order, owned, strict=True) if owner == replica for n in ids]


REQUESTS_TO_THE_STORE = 12  # of a replica that draws all alone: more than its seven leases


@pytest.mark.parametrize("number", range(1, REQUESTS_TO_THE_STORE + 1))
def test_a_replica_that_is_interrupted_at_any_request_to_the_store_shares_none(number, monkeypatch):
    """Another one draws between what this one has seen and what it does."""
    one, other = pair_of_queues(monkeypatch)
    between = []

    def late(call):
        between.extend(n for n, _ in other.take(3))
        return call()

    one.store = Interrupted(one.store, number, late)
    drawn = drained(one)
    assert one.store.left <= 0 and between, "it was interrupted"
    drawn_by_other = between + drained(other)
    assert sorted(drawn + drawn_by_other) == [*range(11)]
    owned = owners(other)
    assert sorted(requests_of(other, owned, "0")) == sorted(drawn)
    assert sorted(requests_of(other, owned, "1")) == sorted(drawn_by_other)


@pytest.mark.parametrize("is_done", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize("number", range(1, REQUESTS_TO_THE_STORE + 1))
def test_a_leader_that_dies_at_any_request_to_the_store_leaves_each_request_free_or_leased(
    number, is_done, monkeypatch
):
    one, other = pair_of_queues(monkeypatch)
    store = one.store

    def die(call):
        if is_done:
            call()
        raise Dies

    one.store = Interrupted(store, number, die)
    with pytest.raises(Dies):
        drained(one)
    before = owners(other)
    drawn = drained(other)
    assert len(drawn) == len(set(drawn)) and sorted(drawn) == sorted(requests_of(other, before, "")), "all free ones"
    assert owners(other) == [owner or "1" for owner in before], "what the dead one has stays its own"


# -- what samples share -----------------------------------------------------------------------------------------


def tokens_read(rank: int, caching: bool) -> dict[int, list[int]]:
    """Tokens that the engine reads of each of four samples of a prompt, by the prompt's length."""
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.inference.generation import GenerationRequest

    stages, _, place = build_stages()
    found = {}
    for length in (8, 17, 24, 40, 48):
        engine = RolloutEngine(stages[0], place.pg_collection, VOCAB, 60, 0.005, 8, prefix_caching=caching)
        context, counts = engine.context, found.setdefault(length, [])
        wrapper = engine.controller.inference_wrapped_model
        forward = wrapper.forward_pass_without_pipeline_parallel

        def counted(inputs, context=context, counts=counts, forward=forward):
            is_prefill = context.request_in_prefill_status_tensor[: context.total_request_count] == 1
            counts += context.request_query_lengths[: context.total_request_count][is_prefill].tolist()
            return forward(inputs)

        wrapper.forward_pass_without_pipeline_parallel = counted
        engine.generate(
            [GenerationRequest([i % VOCAB for i in range(length)], key, 3) for key in range(4)], NEVER, settings_of()
        )
    return found


def test_a_prompt_is_prefilled_once_for_all_its_samples():
    alone, shared = (run_world(tokens_read, 1, caching)[0] for caching in (False, True))
    assert alone == {length: [length] * 4 for length in alone}
    assert shared == {8: [8] * 4, 17: [17] * 4, 24: [24, 8, 8, 8], 40: [40, 8, 8, 8], 48: [48, 16, 16, 16]}
