"""Caches of models of transformers: shared prefixes, prompts in chunks and drafts change no bit."""

import pytest
import torch

from tests.helpers.folders import any_measures, any_types, hf_layouts
from tests.helpers.rollout.engines import NEVER, assert_all_blocks_are_free, settings_of
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

LENGTHS = 3, 16, 37, 50  # of prompts
NEW = 24  # tokens of a response: over the borders of blocks and windows
CHUNKS = {"chunked_prefill": True, "step_tokens": 16}
WAYS = {
    "prefixes": {"prefix_caching": True},
    "chunks": CHUNKS,
    "drafts": {"speculative": True},
    "few": {"blocks": 12},  # of the cache: requests are evicted, and read again
    "all": {"prefix_caching": True, "speculative": True, **CHUNKS},
}


def in_ways(rank, folder, ways):
    """Without any way, and by way: tokens and log-probs of siblings, the second time that they are asked, if with a
    way; how many prompt tokens were read and how many drafted tokens accepted."""
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.inference.generation import GenerationRequest

    torch.set_num_threads(1)
    engine = None
    role, groups, model, _ = hf_layouts.build(folder, any_measures.FLAGS, False, any_measures.LONGEST)
    vocabulary, found = role.model_vocab_size(0), {}
    prompts = [torch.arange(3, 3 + length).mul(7).remainder(vocabulary).tolist() for length in LENGTHS]
    asked = [GenerationRequest(prompt, key * 2 + n, NEW) for key, prompt in enumerate(prompts) for n in range(2)]
    for way in ("plain", *ways):
        options, size = dict(WAYS.get(way, {})), 0.02
        if blocks := options.pop("blocks", None):
            size = (getattr(engine.context, "_state_bytes", 0) + blocks * engine.context.block_size_bytes) / 2**30
        engine = RolloutEngine(model[0], groups.pg_collection, vocabulary, 128, size, 16, **options)
        if options.get("speculative"):  # as if looking for drafts took no time
            engine.drafter.costs = engine.drafter.costs._replace(looking=0.0, looking_row=0.0, drafting=0.0)
        for _ in range(2 if options else 1):
            done = engine.generate(asked, NEVER, settings_of(temperature=0.3))
        assert_all_blocks_are_free(engine)
        read = engine.context.lifetime_prefill_token_count
        found[way] = (
            [(x.tokens, x.logprobs) for x in done],
            read,
            engine.take_decode_counts().accepted if "speculative" in options else 0,
        )
    return found


# Unlike layers that share keys; windows and sinks with experts; expanded latents.
# Convolutions, state spaces, delta rules.
KINDS = "gemma4_text", "gpt_oss", "longcat_flash", "lfm2", "bamba", "mamba2", "qwen3_next"
ENTRIES = {"gemma4_text": dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2)}
ROWS = [(kind, ways) for kind in KINDS for ways in ("few all", "prefixes chunks drafts")]


@pytest.mark.parametrize(("kind", "ways"), by_default(ROWS, [(kind, "few all") for kind in ("gemma4_text", "lfm2")]))
def test_no_way_to_fill_a_cache_changes_a_bit(kind, ways, tmp_path):
    any_types.save(kind, tmp_path / kind, **ENTRIES.get(kind, {}))
    (found,) = run_world(in_ways, 1, tmp_path / kind, ways.split())
    plain, read, accepted = found.pop("plain")
    assert accepted == 0 and list(found) == ways.split()
    for way, (done, also_read, also_accepted) in found.items():
        assert done == plain, way
        assert "prefix_caching" not in WAYS[way] or also_read < read  # for twice as many
        assert "blocks" not in WAYS[way] or also_read > read
        assert "speculative" not in WAYS[way] or also_accepted > NEW
