"""The short way of the engine's layers: the training forward's numbers whatever the layer is made of."""

import pytest
import torch

from megarl.mcore.decode import Rotation
from tests.exactness import largest_gap_allowed
from tests.test_engine import NEVER, largest_gap, make_engine, make_requests, settings_of, texts, written
from tests.worlds import run_world

LAYERS = [
    ("--qk-layernorm", "llama"),
    ("--qk-layernorm", "gpt2"),
    ("--rotary-percent 0.5 --add-qkv-bias", "llama"),
    ("--mlp-chunks-for-prefill 2", "llama"),  # Megatron's own layer around the engine's attention
]


@pytest.mark.parametrize("flags, shape", LAYERS)
def test_kinds_of_layers_have_the_training_forwards_numbers(flags, shape):
    _, gap = run_world(written, 1, flags, shape)[0]
    assert gap <= largest_gap_allowed()


@pytest.mark.parametrize("width", [8, 4])
def test_rotation_has_the_bits_of_megatrons(width):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    generator = torch.Generator().manual_seed(1)
    frequencies = torch.randn(20, 1, 1, width, generator=generator)
    heads, positions = torch.randn(7, 2, 3, 8, generator=generator), torch.tensor([0, 19, 4, 4, 7, 1, 12])
    turned = heads.clone()
    Rotation.of(frequencies, torch.float32).at(positions).turn_(turned)
    wanted = _apply_rotary_pos_emb_bshd(heads, frequencies[positions])
    assert torch.equal(turned, wanted) and not torch.equal(turned, heads)


def with_prompts_in_between(rank, limit):
    """Requests that enter while others decode: prompts and single tokens in the same steps."""
    engine, model, _ = make_engine(max_requests=limit)
    kinds, plan = set(), engine.context._reads

    def watched():
        reads = plan()
        kinds.add((bool(reads.decoding), bool(reads.prompts)))
        return reads

    engine.context._reads = watched
    engine.context.memory_buffer.fill_(float("nan"))
    requests = [type(r)(r.prompt, r.key, 1 + i % 7) for i, r in enumerate(make_requests())]
    completions = engine.generate(requests, NEVER, settings_of())
    return texts(completions), largest_gap(model, requests, completions, 1.0), kinds


def test_prompts_and_single_tokens_share_steps():
    (few, gap, kinds), (many, other_gap, _) = (run_world(with_prompts_in_between, 1, limit)[0] for limit in (4, 20))
    assert {(True, True), (True, False)} <= kinds and few == many
    assert max(gap, other_gap) <= largest_gap_allowed()


def with_megatrons_bookkeeping(rank, is_own, limits):
    """What the engine writes, and how many steps moved on by themselves; else all go Megatron's way."""
    buffer_gb, most = limits
    engine, model, _ = make_engine(buffer_gb=buffer_gb, max_requests=most)
    context, moved = engine.context, []
    advance = type(context)._advance

    def watched(new_tokens):
        moved.append(is_own and advance(context, new_tokens))
        return moved[-1]

    context._advance = watched
    done = engine.generate(make_requests(), NEVER, settings_of())
    free = context.kv_block_allocator.total_avail
    return texts(done), [c.logprobs for c in done], sum(moved), free, largest_gap(model, make_requests(), done, 1.0)


@pytest.mark.parametrize("limits", [(0.005, 32), (0.00005, 32), (0.005, 4)])
def test_steps_that_only_go_on_are_megatrons_steps(limits):
    """With room for all, with a cache in which requests wait and are evicted, and with requests that come later."""
    own, theirs = (run_world(with_megatrons_bookkeeping, 1, is_own, limits)[0] for is_own in (True, False))
    assert own[2] > 0 == theirs[2]
    assert own[:2] == theirs[:2] and own[3] == theirs[3]  # no block is lost
    assert own[4] <= largest_gap_allowed()
