"""Routes recorded during generation: those of the training forward, complete in every cache state, or an error."""

import functools

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay

from megarl.mcore.attention.packing import routed_tokens
from megarl.mcore.inference.generation import GenerationRequest
from megarl.mcore.model import forward_pass
from megarl.mcore.model.gpt import build_frozen_model
from megarl.mcore.moe.router import moe_layers_of, routers_of
from megarl.mcore.moe.routes import Routing
from megarl.roles.passes import forward_only
from tests.helpers.models.tiny_models import VOCAB, build_stages, one_microbatch
from tests.helpers.rollout.engines import NEVER, are_same, engine_on, make_requests, settings_of, take_long_steps
from tests.helpers.tiers import by_default, long
from tests.helpers.worlds import on_each_rank, run_world

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
EP2, SP = "--expert-model-parallel-size 2", "--sequence-parallel"
MOE = "--num-experts 8 --moe-router-topk 3 --num-layers 4 --moe-layer-freq ([0]+[1]*3)"
DENSE_STAGE = "--num-experts 8 --moe-router-topk 3 --num-layers 4 --moe-layer-freq ([0]*2+[1]*2)"
LAYOUTS = {
    "1": (1, MOE),
    "tp2-sp": (2, f"{MOE} {TP2} {SP}"),
    "pp2": (2, f"{MOE} {PP2}"),
    "pp2, a stage without experts": (2, f"{DENSE_STAGE} {PP2}"),
    "ep2": (2, f"{MOE} {EP2}"),
    "tp2-ep2-sp": (4, f"{MOE} {TP2} {EP2} {SP}"),
}
CHUNKS = {"chunked_prefill": True, "step_tokens": 24, "max_requests": 8}
SMALL = {"buffer_gb": 0.0004}  # 26 blocks of 16 tokens, for 12 requests of three and, later, four


def requests_of(prompts: int, samples: int, limit: int = 12):
    """Requests for `samples` responses to each of some prompts of 40 and 32 tokens; a block of the cache has 16."""
    ones = make_requests(limit, prompts * samples)
    begin = [(ones[i].prompt * 40)[: 40 - i % 2 * 8] for i in range(prompts)]
    return [GenerationRequest(begin[i // samples], one.key, limit) for i, one in enumerate(ones)]


engine_of = functools.partial(engine_on, max_length=64, buffer_gb=0.01)


def trained_routes(stages, args, role_groups, requests, completions):
    """([R] positions, [R, L, k] routes) of the training forward over the responses, at this rank's tokens."""
    rows = [request.prompt + completion.tokens for request, completion in zip(requests, completions, strict=True)]
    ((part, places),) = one_microbatch(rows)
    seen = routed_tokens(part.lengths, role_groups.pg_collection, args.sequence_parallel)
    routing = Routing("actor", moe_layers_of(stages), args.num_experts, seen)
    forward = lambda chunk, part: forward_pass.token_scores(chunk, part.tokens, part.lengths, 1.2, VOCAB, routing)  # noqa: E731
    forward_only(stages, [(part, places)], forward, role_groups.pg_collection)
    real = seen.token_indices < len(part.tokens)
    return seen.token_indices[real], routing.recorded(args.moe_router_topk)[real]


def check_routes(stages, args, place, requests, completions):
    """The engine's routes are the training forward's, those of the last tokens none."""
    found = torch.cat([completion.routes for completion in completions])
    places, expected = trained_routes(stages, args, place, requests, completions)
    assert found.dtype == torch.int16 and found.shape[1:] == (expected.shape[1], args.moe_router_topk)
    assert torch.equal(found[places], expected)
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.routes) == len(request.prompt) + len(completion.tokens)
        assert (completion.routes[-1] == -1).all() and (completion.routes[:-1] >= 0).all()
        assert (completion.routes[:-1].diff(dim=-1) > 0).all(), "k experts, ascending"


def generated(rank, flags: str):
    """Layers of this rank, after the checks of a plain engine and of one that shares and cuts prompts."""
    stages, args, place = build_stages(flags)
    shared = {"prefix_caching": True, **CHUNKS}
    for options, every in (({}, make_requests(limit=8, count=8)), (shared, requests_of(3, 2))):
        requests = every[place.dp_rank :: len(place.replicas)][place.dp_rank :]  # replicas with unequal work
        engine = engine_of(stages[0], place, **options)
        check_routes(stages, args, place, requests, engine.generate(requests, (3,), settings_of(temperature=1.2), True))
    return engine.layers


@pytest.mark.parametrize("layout", by_default(LAYOUTS, ("tp2-sp", "pp2, a stage without experts")))
def test_routes_are_those_of_the_training_forward(layout):
    size, flags = LAYOUTS[layout]
    layers = run_world(generated, size, flags)
    if "pp2" in layout:
        assert layers == ([(), (3, 4)] if flags.startswith(DENSE_STAGE) else [(2,), (3, 4)])
    else:
        assert layers == [(2, 3, 4)] * size


@on_each_rank()
def test_more_than_256_experts_keep_their_ids(rank):
    stages, args, place = build_stages("--num-experts 300 --moe-router-topk 4 --num-layers 1 --hidden-size 16"
                                       " --ffn-hidden-size 16 --moe-ffn-hidden-size 16")  # fmt: skip
    requests = make_requests(limit=2, count=10)
    completions = engine_of(stages[0], place).generate(requests, NEVER, settings_of(temperature=1.2), True)
    check_routes(stages, args, place, requests, completions)
    routes = torch.cat([completion.routes for completion in completions])
    assert routes.dtype == torch.int16 and 256 <= routes.max() < 300 and len(routes.unique()) > 100


def written_with(rank, options: dict):
    """(completions, events in the engine) of the same requests for all options, compared with the training forward."""
    stages, args, place = build_stages(MOE)
    engine, requests = engine_of(stages[0], place, **options), requests_of(3, 4)
    completions = engine.generate(requests, (3,), settings_of(temperature=1.2), True)
    check_routes(stages, args, place, requests, completions)
    record = {"shared": engine.engine._prefill_tokens_skipped, "evicted": engine.engine.evicted_request_count}
    return completions, record | {"step": engine.context.max_tokens}


@functools.cache
def plainly_written():
    ((completions, record),) = run_world(written_with, 1, {})
    assert record == {"shared": 0, "evicted": 0, "step": 4096}
    return completions


@pytest.mark.parametrize("options, went_through", [
    long(({"prefix_caching": True}, {"shared": 3 * (32 + 16 + 32)})),
    long((CHUNKS, {"step": 24})),
    ({"prefix_caching": True, **CHUNKS}, {"shared": None, "step": 24}),
    long((SMALL, {"evicted": None})),
    ({"prefix_caching": True, **SMALL}, {"shared": None, "evicted": None}),
    ({"chunked_prefill": True, "step_tokens": 64, **SMALL}, {"evicted": None, "step": 64}),
], ids=str)  # fmt: skip
def test_responses_logprobs_and_routes_do_not_depend_on_the_cache(options, went_through):
    completions, record = run_world(written_with, 1, options)[0]
    assert are_same(completions, plainly_written())
    for name, value in went_through.items():
        assert record[name] == value if value is not None else record[name] > 0, (name, record)


@on_each_rank()
def test_a_weight_sync_invalidates_cached_prefixes(rank):
    stages, args, place = build_stages(MOE)
    engine, requests = engine_of(stages[0], place, prefix_caching=True, **CHUNKS), requests_of(3, 4)
    sample, steps = engine.sampling.sample_kernel, []

    def stop_after_the_prompts(*args, **kwargs):
        steps.append(None)
        if len(steps) == 7:
            raise InterruptedError
        return sample(*args, **kwargs)

    engine.sampling.sample_kernel = stop_after_the_prompts
    with pytest.raises(InterruptedError):
        engine.generate(requests, NEVER, settings_of(), True)
    assert engine.context.kv_block_allocator.kv_hash_to_block_id
    assert_nothing_records(stages, engine)
    engine.sampling.sample_kernel = sample
    with torch.no_grad():
        for parameter in stages.parameters():
            parameter.mul_(1.1)
    after = engine.generate(requests, NEVER, settings_of(), True)
    check_routes(stages, args, place, requests, after)
    assert are_same(after, engine_of(stages[0], place).generate(requests, NEVER, settings_of(), True))


def with_and_without_duplicates(rank, flags: str):
    """(completions, rows of each step's first MoE layer) of the same requests, whose prompts come four times, with
    equal prompts of a step computed once and with each computed."""
    stages, args, place = build_stages(f"{MOE} {flags}")
    requests = requests_of(3, 4)[place.dp_rank :: len(place.replicas)]
    engine, found = engine_of(stages[0], place), []
    layer = next(layer for layer in stages[0].decoder.layers if hasattr(layer.mlp, "router"))
    for engine.context._may_share in (engine.context._may_share, False):
        rows = []
        hook = layer.mlp.register_forward_hook(lambda module, inputs, output, rows=rows: rows.append(len(output[0])))
        completions = engine.generate(requests, (3,), settings_of(temperature=1.2), True)
        hook.remove()
        check_routes(stages, args, place, requests, completions)
        found.append((completions, rows))
    return found


@pytest.mark.parametrize("size, flags", [(1, ""), (2, EP2)])
def test_equal_prompts_of_a_step_are_computed_once_with_the_same_routes(size, flags):
    for (once, few), (each, all_rows) in run_world(with_and_without_duplicates, size, flags):
        assert are_same(once, each) and few[1:] == all_rows[1:]
        assert (few[0], all_rows[0]) == ((112, 448) if size == 1 else (112, 224))


@on_each_rank()
def test_short_decode_steps_record_the_same_routes(rank):
    stages, args, place = build_stages(MOE)
    engine, requests, found = engine_of(stages[0], place), requests_of(3, 4, limit=20), []
    advance = engine.context.advance_decode
    for takes_long in (False, True):
        short = []
        if takes_long:
            take_long_steps(engine)
        engine.context.advance_decode = lambda tokens, short=short: short.append(len(tokens)) or advance(tokens)
        completions = engine.generate(requests, (3,), settings_of(temperature=1.2), True)
        check_routes(stages, args, place, requests, completions)
        found.append((completions, len(short)))
    (short, steps), (every, none) = found
    assert are_same(short, every) and steps > 5 and none == 0


def assert_nothing_records(stages, engine):
    assert RouterReplay.global_router_replay_instances == [] and not stages[0].config.moe_enable_routing_replay
    for router in routers_of(stages):
        assert router.router_replay.router_replay_action is None and router.router_replay.recorded_topk_idx is None


@on_each_rank()
def test_incomplete_routes_are_an_error(rank):
    stages, args, place = build_stages(MOE)
    engine, requests = engine_of(stages[0], place), make_requests(limit=3)
    recorder, blocks = routers_of(stages)[1].router_replay, engine.context.kv_block_allocator
    record, store = recorder.record_indices, blocks.store_routing_per_block
    messages = []
    for thing, name, fault in (
        (recorder, "record_indices", lambda routes: None),  # off
        (recorder, "record_indices", lambda routes: record(routes[1:])),
        (blocks, "store_routing_per_block", lambda routes: None),
        (blocks, "store_routing_per_block", lambda routes: store(routes[:-1])),
        (blocks, "save_finished", lambda is_active: None),
    ):
        setattr(thing, name, fault)
        with pytest.raises(RuntimeError) as raised:
            engine.generate(requests, NEVER, settings_of(), True)
        delattr(thing, name)
        messages.append(str(raised.value))
        assert_nothing_records(stages, engine)
    check_routes(stages, args, place, requests, engine.generate(requests, NEVER, settings_of(temperature=1.2), True))
    off, short, *lost = messages
    for message in (off, short, *lost):
        assert message.startswith("rollout: ") and "MoE layers [2, 3, 4]" in message
    tokens = int(off.rsplit(" ", 1)[1])
    assert f"routes of {[tokens, 0, tokens]} tokens" in off
    assert f"routes of {[tokens, tokens - 1, tokens]} tokens" in short
    for message, known in zip(lost, (0, None, 0), strict=True):
        words = message.split()
        wanted, found = int(words[-3]), int(words[words.index("tokens") - 1])
        assert "has routes of" in message and 0 <= found < wanted and known in (None, found)


@on_each_rank()
def test_two_models_of_a_process_record_separately(rank):
    stages, args, place = build_stages(MOE)
    args.seed += 1
    reference = build_frozen_model(args, VOCAB, place.pg_collection)
    requests, settings = make_requests(limit=2), settings_of(temperature=1.2)
    engines = [(model, engine_of(model[0], place)) for model in (stages, reference)]
    routes = []
    for model, engine in (*engines, *engines):
        completions = engine.generate(requests, NEVER, settings, True)
        for other, its_engine in engines:
            assert_nothing_records(other, its_engine)
        check_routes(model, args, place, requests, completions)
        routes.append(torch.cat([completion.routes for completion in completions]))
    actor, reference, again, twice = routes
    assert torch.equal(actor, again) and torch.equal(reference, twice) and not torch.equal(actor, reference)


@on_each_rank()
def test_nothing_is_recorded_unless_asked_for(rank):
    stages, _, place = build_stages(MOE)
    engine, requests = engine_of(stages[0], place), make_requests(limit=2)
    recorded = engine.generate(requests, NEVER, settings_of(), True)
    sample, seen = engine.sampling.sample_kernel, []

    def look(*args, **kwargs):
        assert_nothing_records(stages, engine)
        seen.append(None)
        return sample(*args, **kwargs)

    engine.sampling.sample_kernel = look
    plain = engine.generate(requests, NEVER, settings_of())
    assert seen and all(completion.routes is None for completion in plain)
    assert plain == recorded
