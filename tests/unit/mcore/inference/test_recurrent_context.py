"""States of requests in a rollout: equal prompts, prompts in parts, evicted requests, slots that are used again."""

import dataclasses
import functools

import pytest

from megarl.mcore.inference.generation import GenerationRequest
from megarl.mcore.inference.recurrent_context import StateSnapshots
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.models.tiny_models import build
from tests.helpers.rollout.engines import NEVER, engine_on, largest_gap, make_engine, make_requests, settings_of, texts
from tests.helpers.tiers import by_default
from tests.helpers.worlds import on_each_rank, run_world

BLOCK = 16 * 2 * 2 * 16 * 4  # bytes of 16 tokens in one layer with keys and values


def requests(times: int = 1):
    """Ragged prompts, some of them equal, with random streams of their own; each prompt is repeated so often."""
    found = make_requests()
    found += [GenerationRequest(each.prompt, 100 + i, 12) for i, each in enumerate(found[:6])]
    return [dataclasses.replace(each, prompt=each.prompt * times) for each in found]


def state_bytes(engine) -> int:
    states = next(each for each in engine.context._states if each is not None)
    return sum(part.nbytes for part in states)


def generated(rank, blocks: int | None = None, shape: str = "recurrent", times: int = 1, **settings):
    """(texts, gap, what happened, texts of an engine with much memory); `blocks`: of the cache, beside the states;
    `times`: prompts are repeated so often."""
    model, _, place = build("", shape)
    whole = {"max_length": settings.get("max_length", 48), "max_requests": settings.get("max_requests", 32)}
    probe = engine_on(model, place, buffer_gb=0.01, **whole)
    layers = sum(each is not None for each in probe.context._states)
    size = 0.01 if blocks is None else (layers * state_bytes(probe) + blocks * probe.context.block_size_bytes) / 2**30
    engine = engine_on(model, place, buffer_gb=size, **settings)
    for states in (each for each in engine.context._states if each is not None):
        for part in states:
            part.fill_(float("nan"))
    seen, asked = {"deduplicated": 0, "read": 0}, requests(times)
    plan = engine.context._host_plan

    def watched(*args):
        found = plan(*args)
        seen["deduplicated"] += found.dedup is not None
        return found

    engine.context._host_plan = watched
    completions = engine.generate(asked, NEVER, settings_of(temperature=1.1))
    seen["read"] = engine.take_counts().read
    expected = probe.generate(asked, NEVER, settings_of(temperature=1.1))
    return texts(completions), largest_gap(model, asked, completions, 1.1), seen, texts(expected)


CASES = {
    "much memory": {},
    "four slots": {"max_requests": 4},
    "prompts in parts": {"chunked_prefill": True, "step_tokens": 12, "max_requests": 8},
    "few blocks": {"blocks": 12},
    "few blocks, prompts in parts": {"blocks": 12, "chunked_prefill": True, "step_tokens": 12, "max_requests": 8},
}


CASES |= {f"mamba, {name}": case | {"shape": "mamba"} for name, case in CASES.items()}
# States beside latents; prompts of more than 384 tokens.
CASES["latents, few blocks"] = {"shape": "kimi", "times": 20, "max_length": 24 * 20 + 24, "blocks": 50}
FIRST = ("few blocks, prompts in parts", "mamba, much memory", "latents, few blocks")


@pytest.mark.parametrize("case", by_default(CASES, FIRST))
def test_no_way_through_the_engine_changes_a_bit(case):
    ((found, gap, seen, expected),) = run_world(functools.partial(generated, **CASES[case]), 1)
    prompts = sum(len(each.prompt) for each in requests(CASES[case].get("times", 1)))
    assert found == expected and gap <= largest_gap_allowed()
    if case.endswith("much memory"):
        assert seen["deduplicated"]
    if "blocks" in CASES[case]:
        assert seen["read"] > prompts  # some were evicted, and read again


def test_the_snapshot_that_was_not_used_for_the_longest_time_goes_first():
    kept = StateSnapshots(range(8, 11))
    assert [kept.take(block, ()) for block in (1, 2, 3)] == [8, 9, 10]
    assert kept.use(1) == 8 and kept.take(4, {9}) == 10  # the slot of 2 is pinned
    assert 3 not in kept and 2 in kept and len(kept) == 3
    assert kept.take(5, {8, 9, 10}) is None and 5 not in kept
    kept.drop([1, 77])
    assert kept.take(6, {9, 10}) == 8 and 1 not in kept
    kept.clear()
    assert len(kept) == 0 and kept.take(7, ()) == 8


@on_each_rank()
def test_states_and_cache_share_the_buffer(rank):
    engine, _, _ = make_engine("--num-layers 4", "recurrent", buffer_gb=0.01, max_requests=8)
    context = engine.context
    shapes = [None if each is None else tuple(tuple(part.shape) for part in each) for each in context._states]
    blocks, block_bytes = context.kv_block_allocator.total_count, context.block_size_bytes
    assert shapes == [((8, 3, 160), (8, 4, 24, 16)), None, ((8, 3, 160), (8, 4, 24, 16)), None]
    assert block_bytes == 2 * BLOCK  # two of four layers have keys and values
    assert blocks == (int(0.01 * 2**30) - 2 * state_bytes(engine)) // block_bytes
