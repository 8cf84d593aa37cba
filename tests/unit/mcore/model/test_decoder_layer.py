"""The engine's fast path through a layer: equal to the training forward for every kind of layer."""

import pytest

from tests.helpers.exactness import largest_gap_allowed
from tests.helpers.rollout.engines import (
    NEVER,
    generate_standard,
    largest_gap,
    make_engine,
    make_requests,
    settings_of,
    texts,
)
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
