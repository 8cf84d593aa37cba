"""The cache of latents: its size, and rollouts that share, split, evict and regenerate its blocks."""

import functools

import pytest
import torch

from megarl.mcore.attention.backends import sdpa
from megarl.mcore.inference.generation import GenerationRequest
from megarl.mcore.kernels import native
from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.models.attention_inputs import needs_kernels
from tests.helpers.models.tiny_models import CHOOSING, VOCAB, build
from tests.helpers.rollout.engines import (
    NEVER,
    engine_on,
    generate_standard,
    largest_gap,
    make_engine,
    make_requests,
    settings_of,
    standard,
    texts,
)
from tests.helpers.worlds import run_world

LATENT, KEY, INDEX_KEY = 16, 8, 16  # channels of the tiny model
ONE_CHOOSES = f"{CHOOSING} --dsa-indexer-layers 1,0"


def sizes(rank, flags: str):
    engine, _, _ = make_engine(flags, "latent")
    context = engine.context
    caches, memory = context.layer_caches(), context.memory_buffer
    starts = [cache.storage_offset() for cache in caches]
    assert memory.is_contiguous() and sum(cache.numel() for cache in caches) == memory.numel()
    assert starts == [sum(cache.numel() for cache in caches[:i]) for i in range(len(caches))]
    return [tuple(x.shape) for x in caches], context.kv_block_allocator.total_count, context.block_size_bytes


ROWS = [(1, "", (0, 0)), (2, "--tensor-model-parallel-size 2", (0, 0))]
ROWS.append(pytest.param(1, ONE_CHOOSES, (INDEX_KEY, 0), marks=needs_kernels))


@pytest.mark.parametrize("ranks, flags, index_keys", ROWS)
def test_a_token_has_a_latent_and_a_key_in_each_layer_on_every_rank(ranks, flags, index_keys):
    """A layer that uses the choice of another one has no index keys."""
    widths = [LATENT + KEY + more for more in index_keys]
    for shapes, blocks, block_bytes in run_world(sizes, ranks, flags):
        assert shapes == [(blocks, 16, width) for width in widths]
        assert block_bytes == 16 * sum(widths) * 4
        assert blocks * block_bytes <= 0.005 * 2**30 < (blocks + 2) * block_bytes


def shared_prefixes(rank, **engine_settings):
    """(texts with these settings, gap, texts of an engine without), for prompts that begin alike."""
    model, _, place = build("", "latent")
    prompt = torch.randint(0, VOCAB, (36,), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [prompt[:n] + [n % VOCAB] for n in (35, 20, 35, 33, 17, 3, 34, 33, 16)]
    requests = [GenerationRequest(tokens, 100 + i, 12) for i, tokens in enumerate(prompts)]
    found = []
    for settings in ({}, engine_settings):
        found.append(engine_on(model, place, **settings).generate(requests, NEVER, settings_of()))
    return texts(found[1]), largest_gap(model, requests, found[1], 1.0), texts(found[0])


@pytest.mark.parametrize("engine_settings", [
    {"prefix_caching": True}, {"chunked_prefill": True, "step_tokens": 12, "max_requests": 8},
    {"prefix_caching": True, "chunked_prefill": True, "step_tokens": 12, "max_requests": 8},
    {"prefix_caching": True, "buffer_gb": 0.00005}, {"buffer_gb": 0.00005, "max_requests": 3},
], ids=str)  # fmt: skip
def test_sharing_splitting_and_evicting_change_no_bit(engine_settings):
    ((found, gap, expected),) = run_world(functools.partial(shared_prefixes, **engine_settings), 1)
    assert found == expected and gap <= largest_gap_allowed()


def in_small_reads(rank, scratch, kernels):
    """Completions when each kernel call expands few latents, and rows of each call."""
    native.enable(kernels == "compiled")
    sdpa.SCRATCH_BYTES = scratch
    engine, model, _ = make_engine("", "latent")
    calls, expand = [], model.decoder.layers[0].self_attention.expand
    model.decoder.layers[0].self_attention.expand = lambda rows: calls.append(rows.shape[:-1].numel()) or expand(rows)
    completions, counts = engine.generate(make_requests(), NEVER, settings_of()), list(calls)
    return texts(completions), largest_gap(model, make_requests(), completions, 1.0), counts


@pytest.mark.parametrize("kernels", ["compiled", "blas"])
def test_expanded_latents_stay_within_the_scratch_memory(kernels):
    wide = 2 * 4 * 20 * 4  # bytes of a token's keys and values
    (small,), (large,) = (run_world(in_small_reads, 1, scratch, kernels) for scratch in (50 * wide, 2**23))
    assert small[0] == large[0] == texts(standard("latent")[0]) and max(small[1], large[1]) <= largest_gap_allowed()
    assert max(small[2]) <= 100 < max(large[2])  # PyTorch's operators pad keys to whole vectors


def test_the_written_out_backend_agrees_with_itself():
    ((completions, gap),) = run_world(generate_standard, 1, "--attention-backend eager", "latent")
    assert gap <= largest_gap_allowed()
    for found, expected in zip(completions, standard("latent")[0], strict=True):
        assert found.tokens == expected.tokens
        assert found.logprobs == pytest.approx(expected.logprobs, abs=5e-5)
