"""The engine's fast path through a layer: equal to the training forward for every kind of layer."""

import pytest
import torch

from megarl.mcore.model.decoder_layer import Rotation
from tests.helpers.engines import NEVER, generate_standard, largest_gap, make_engine, make_requests, settings_of, texts
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.worlds import run_world

LAYERS = [
    ("--qk-layernorm", "llama"),
    ("--qk-layernorm", "gpt2"),
    ("--rotary-percent 0.5 --add-qkv-bias", "llama"),
    ("--mlp-chunks-for-prefill 2", "llama"),  # Megatron's own layer around the engine's attention
]


@pytest.mark.parametrize("flags, shape", LAYERS)
def test_all_kinds_of_layers_give_the_training_forwards_logprobs(flags, shape):
    _, gap = run_world(generate_standard, 1, flags, shape)[0]
    assert gap <= largest_gap_allowed()


@pytest.mark.parametrize("width", [8, 4])
def test_rotary_embedding_equals_megatrons_to_the_bit(width):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    generator = torch.Generator().manual_seed(1)
    frequencies = torch.randn(20, 1, 1, width, generator=generator)
    heads, positions = torch.randn(7, 2, 3, 8, generator=generator), torch.tensor([0, 19, 4, 4, 7, 1, 12])
    turned = heads.clone()
    Rotation.of(frequencies, torch.float32).at(positions).apply_(turned)
    wanted = _apply_rotary_pos_emb_bshd(heads, frequencies[positions])
    assert torch.equal(turned, wanted) and not torch.equal(turned, heads)


def with_prompts_in_between(rank, limit):
    """Requests that enter while others decode: prompts and single tokens in the same steps."""
    engine, model, _ = make_engine(max_requests=limit)
    kinds, plan = set(), engine.context._reads

    def watched():
        dedup, reads = plan()
        kinds.add((bool(reads[0].decodes), bool(reads[0].prefills)))
        return dedup, reads

    engine.context._reads = watched
    engine.context.memory_buffer.fill_(float("nan"))
    requests = [type(r)(r.prompt, r.key, 1 + i % 7) for i, r in enumerate(make_requests())]
    completions = engine.generate(requests, NEVER, settings_of())
    return texts(completions), largest_gap(model, requests, completions, 1.0), kinds


def test_prefill_and_decode_share_steps():
    (few, gap, kinds), (many, other_gap, _) = (run_world(with_prompts_in_between, 1, limit)[0] for limit in (4, 20))
    assert {(True, True), (True, False)} <= kinds and few == many
    assert max(gap, other_gap) <= largest_gap_allowed()


def with_megatrons_bookkeeping(rank, is_own, limits):
    """(responses, steps that advanced without the host, steps on megarl's path); the others take Megatron's path."""
    buffer_gb, most = limits
    engine, model, _ = make_engine(buffer_gb=buffer_gb, max_requests=most)
    context, moved, theirs = engine.context, [], []
    advance, step = type(context)._advance, engine.engine.async_step

    def watched(new_tokens):
        moved.append(is_own and advance(context, new_tokens))
        return moved[-1]

    def counted():
        theirs.append(1)
        return step()

    context._advance, engine.engine.async_step = watched, counted
    if not is_own:
        from megarl.mcore.inference.decode_loop import DecodeLoopEngine

        engine.engine.__class__ = type("LongSteps", (DecodeLoopEngine,), {"_only_decodes": False})
    done = engine.generate(make_requests(), NEVER, settings_of())
    free, gap = context.kv_block_allocator.total_avail, largest_gap(model, make_requests(), done, 1.0)
    return texts(done), [c.logprobs for c in done], sum(moved), free, gap, len(theirs)


@pytest.mark.parametrize("limits", [(0.005, 32), (0.00005, 32), (0.005, 4)])
def test_decode_only_steps_equal_megatrons(limits):
    """With room for all, with a cache in which requests wait and are evicted, and with requests that come later."""
    own, theirs = (run_world(with_megatrons_bookkeeping, 1, is_own, limits)[0] for is_own in (True, False))
    assert own[2] > 0 == theirs[2]
    assert own[:2] == theirs[:2] and own[3] == theirs[3]  # no block is lost
    assert own[4] <= largest_gap_allowed()
    assert own[5] < theirs[5]  # some steps did not ask Megatron's engine at all


def with_twins(rank, may_share, shape, flags):
    """(responses to duplicate prompts, rows of the steps that were computed once)."""
    engine, model, _ = make_engine(flags, shape, max_requests=16)
    context, saved = engine.context, []
    plan, context._may_share = context._reads, context._may_share and may_share

    def watched():
        dedup, reads = plan()
        saved.append(0 if dedup is None else len(dedup.inverse) - len(dedup.kept_tokens))
        return dedup, reads

    context._reads = watched
    context.memory_buffer.fill_(float("nan"))
    some = make_requests()
    requests = [type(r)(some[i // 3].prompt, r.key, 1 + i % 5) for i, r in enumerate(some)]
    done = engine.generate(requests, NEVER, settings_of())
    gap = 0.0 if flags else largest_gap(model, requests, done, 1.0)
    return texts(done), [c.logprobs for c in done], sum(saved), gap


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_duplicate_prompts_are_prefilled_once(shape):
    once, alone = (run_world(with_twins, 1, may_share, shape, "")[0] for may_share in (True, False))
    assert once[2] > 100 > 0 == alone[2]
    assert once[:2] == alone[:2]
    assert once[3] <= largest_gap_allowed()


def test_each_pipeline_stage_prefills_duplicates_once():
    stages = run_world(with_twins, 2, True, "llama", "--pipeline-model-parallel-size 2")
    assert all(texts_and_more[:3] == run_world(with_twins, 1, True, "llama", "")[0][:3] for texts_and_more in stages)


def test_duplicates_are_whole_equal_prompts():
    """A request with older keys is not a duplicate; padding keeps its rows; too few rows are not deduplicated."""
    from megarl.mcore.attention.cache_attention import deduplicate_prefills

    text = torch.tensor([7, 8, 9, 7, 8, 9, 7, 8, 9, 5, 0, 0])
    queries, keys = torch.tensor([3, 3, 3, 1]), torch.tensor([3, 9, 3, 1])
    found = deduplicate_prefills(text, queries, keys)
    assert found.requests.tolist() == [0, 1, 3]
    assert found.kept_tokens.tolist() == [0, 1, 2, 3, 4, 5, 9, 10, 11]
    assert found.inverse.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7, 8]
    assert torch.equal(text[found.kept_tokens][found.inverse], text)
    assert deduplicate_prefills(text[:9], queries[:3], torch.tensor([3, 9, 8])) is None
    assert deduplicate_prefills(torch.tensor([4] * 6), torch.ones(6).long(), torch.ones(6).long()) is None
