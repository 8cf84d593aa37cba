"""What a rank holds and sends for a step at a fixed share of it: it must not grow with the number of ranks."""

import contextlib
import gc
import json
import os
import tracemalloc

import pytest
import torch
import torch.distributed as dist

from megarl.comm import role_mesh
from megarl.data import node_files
from megarl.data.conversations import Encoder
from megarl.data.prompts import load_prompts
from megarl.mcore.parallel.process_groups import fake_world
from megarl.observe.timers import ALL_RANKS_EVENTS, MAX_EVENTS, last_events
from tests.helpers.models.tiny_models import parse_roles
from tests.helpers.worlds import SAFETY, run_world

PROMPTS, SAMPLES, PROMPT_LENGTH, RESPONSE_LENGTH = 4, 8, 200, 300  # of a rank
LINES = 256
ROLES = ("actor", "critic", "reward", "reference")


class Bytes:
    """A tokenizer of bytes."""

    special, eos_id, end_ids, bos_id, vocab_size, fingerprint = {}, 0, (0,), None, 256, "bytes"
    prefix_ids = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Engine:
    """Responses of random tokens; only what the rollout uses of an engine."""

    capacity, layers, empty_routes = 10**6, (), torch.zeros(0, 1, 1, dtype=torch.int16)

    def __init__(self, *_, **__):
        pass

    def take_image_counts(self):
        return None

    def take_counts(self):
        from megarl.mcore.inference.generation import EngineCounts

        return EngineCounts()

    def stream(self, source, end_ids, settings, routes, max_requests, response_limit=None):
        from megarl.mcore.inference.generation import Completion

        while not source.is_empty():
            for number, request in source.take(8):
                tokens = [(request.key + i) % 256 for i in range(RESPONSE_LENGTH)]
                yield number, Completion(tokens, [-1.0 - i for i in range(RESPONSE_LENGTH)], False)


class NoReward:
    """A reward role without verifiers or models."""

    name, terms = "reward", ()
    rows: list = []
    needs_whole_groups = False

    def prepare(self, prompts, lines):
        pass


def batcher_of(path: str, size: int, samples: int = SAMPLES):
    """A rank's batcher in a world of `size` replicas, over real prompts."""
    from megarl.arguments import Settings
    from megarl.observe.timers import Timers
    from megarl.rollout import rollout as rollout_module
    from megarl.rollout.batcher import RolloutBatcher

    settings = Settings(
        prompts_per_step=PROMPTS * size, samples_per_prompt=samples, max_prompt_length=PROMPT_LENGTH,
        max_response_length=RESPONSE_LENGTH, rollout_dispatch="static",
    )  # fmt: skip
    roles, timers = parse_roles("", size, program="rl"), Timers()
    mesh = role_mesh.create_mesh(roles, SAFETY)
    rollout_module.RolloutEngine = Engine
    rollout = rollout_module.Rollout(settings, roles["rollout"], mesh, [None], Bytes(), timers)
    prompts = load_prompts(path)
    tokens = prompts.encode(Encoder(Bytes()), PROMPT_LENGTH)
    node_files.remove()
    return RolloutBatcher(rollout, NoReward(), prompts, tokens, 64)


@contextlib.contextmanager
def in_world_of(size: int):
    """Makes the only rank of a world the first of a fake world."""
    dist.destroy_process_group()
    os.environ["WORLD_SIZE"] = str(size)
    with fake_world(size):
        yield


def tensor_bytes() -> int:
    """Bytes of all tensors of this process."""
    storages = [t.untyped_storage() for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def held(rank: int, path: str, size: int) -> dict[str, int]:
    """Bytes of a step: peak of Python objects and arrays, tensors of the responses, and all tensors once dispatched."""
    with in_world_of(size):
        batcher = batcher_of(path, size)
        batcher.generate(1)  # caches that every process fills once
        gc.collect()
        before = tensor_bytes()
        tracemalloc.start()
        batch = batcher.generate(2)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        generated = tensor_bytes() - before
        batch.dispatch(*ROLES)
        assert len(batch["rollout"]) == PROMPTS * SAMPLES and len(batch["rollout"].tokens) > 10_000
        return {"python": peak, "generated": generated, "dispatched": tensor_bytes() - before}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("prompts") / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i:04}" * (PROMPT_LENGTH // 4)}) + "\n" for i in range(LINES)))
    return str(file)


@pytest.mark.long
def test_memory_of_a_rank_does_not_grow_with_the_world(path):
    found = {size: run_world(held, 1, path, size)[0] for size in (1, 4, 16)}
    print("bytes of a rank:", found)
    for size in (4, 16):
        assert found[size]["python"] <= 1.1 * found[1]["python"]
        assert found[size]["generated"] <= 1.1 * found[1]["generated"]
    # Of several ranks each sends and receives; one rank passes its responses on without a copy.
    assert found[16]["dispatched"] <= 1.1 * found[4]["dispatched"] <= 1.1 * 2.1 * found[1]["dispatched"]


def sent(rank: int, path: str, size: int) -> dict:
    """Collectives of a step, and their bytes on this rank by kind, and the groups that it has made."""
    calls, joined = {"small": 0, "payload": 0, "collectives": 0}, []

    def counting(function, kind, tensor_of):
        def counted(*args, **kwargs):
            calls["collectives"] += 1
            calls[kind] += tensor_of(args).nbytes
            return function(*args, **kwargs)

        return counted

    new_group = dist.new_group

    def group(ranks, **kwargs):
        joined.extend([len(ranks)] * (0 in ranks))
        return new_group(ranks, **kwargs)

    dist.new_group = group
    with in_world_of(size):
        batcher = batcher_of(path, size, 2)
        dist.all_reduce = counting(dist.all_reduce, "small", lambda args: args[0])
        exchange = dist.all_to_all_single

        def all_to_all(received, given, *splits, **kwargs):
            kind = "payload" if given.dtype == torch.uint8 else "small"
            return counting(exchange, kind, lambda args: args[1])(received, given, *splits, **kwargs)

        dist.all_to_all_single = all_to_all
        batcher.generate(1).dispatch(*ROLES)
    return calls | {"groups": len(joined)}


def test_a_rank_of_1024_sends_its_share_and_a_few_bytes_per_sequence(path):
    found = {size: run_world(sent, 1, path, size)[0] for size in (16, 1024)}
    print("a step's collectives of a rank:", found)
    small, large = found[16], found[1024]
    assert small["groups"] == large["groups"] <= 3
    assert small["collectives"] == large["collectives"] <= 16
    assert large["payload"] <= 1.1 * small["payload"]
    sequences = 1024 * PROMPTS * 2
    assert large["small"] <= 40 * sequences  # lengths, replicas: a few numbers per sequence of the step


def test_the_timeline_of_many_ranks_is_limited():
    events = list(range(MAX_EVENTS))
    assert last_events(events, 4) == events
    assert last_events(events, 1024) == events[-(ALL_RANKS_EVENTS // 1024) :] and len(last_events(events, 10**6)) == 1
