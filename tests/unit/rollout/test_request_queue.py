"""Requests dispatched to replicas during generation: none lost or generated twice, no response depends on it."""

import functools
import itertools

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
    return place.dp_rank, done, [key for key in (source.key, f"{source.key}/done") if source.store.check([key])]


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
