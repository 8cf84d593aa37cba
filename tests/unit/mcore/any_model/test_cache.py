"""Caches of models of transformers: shared prefixes, prompts in chunks and drafts change no bit."""

import pytest
import torch

from tests.helpers.folders import any_measures, any_types, hf_layouts
from tests.helpers.rollout.engines import NEVER, assert_all_blocks_are_free, settings_of
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

LENGTHS = 3, 16, 37, 50  # of prompts
NEW = 40  # tokens of a response: over the borders of blocks and windows
CHUNKS = {"chunked_prefill": True, "step_tokens": 16}
WAYS = {
    "prefixes": {"prefix_caching": True},
    "chunks": CHUNKS,
    "drafts": {"speculative": True},
    "all": {"prefix_caching": True, "speculative": True, **CHUNKS},
}


def in_ways(rank, folder, flags):
    """By way: tokens and log-probs of siblings, the second time that they are asked; how many prompt tokens were read
    and how many drafted tokens accepted."""
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.inference.generation import GenerationRequest

    torch.set_num_threads(1)
    role, groups, model, _ = hf_layouts.build(folder, f"{any_measures.FLAGS} {flags}", False, any_measures.LONGEST)
    vocabulary, found = role.model_vocab_size(0), {}
    prompts = [torch.arange(3, 3 + length).mul(7).remainder(vocabulary).tolist() for length in LENGTHS]
    asked = [GenerationRequest(prompt, key * 4 + n, NEW) for key, prompt in enumerate(prompts) for n in range(4)]
    for way, options in {"plain": {}, **WAYS}.items():
        engine = RolloutEngine(model[0], groups.pg_collection, vocabulary, 128, 0.02, 16, **options)
        if options.get("speculative"):  # as if looking for drafts took no time
            engine.drafter.costs = engine.drafter.costs._replace(looking=0.0, looking_row=0.0, drafting=0.0)
        for _ in range(2):
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
@pytest.mark.parametrize("kind", by_default(("gemma4_text", "gpt_oss", "longcat_flash"), ("gemma4_text",)))
def test_no_way_to_fill_a_cache_changes_a_bit(kind, tmp_path):
    any_types.save(kind, tmp_path / kind)
    (found,) = run_world(in_ways, 1, tmp_path / kind, "")
    plain, read, accepted = found["plain"]
    assert accepted == 0 and found["drafts"][2] > NEW and found["all"][2] > NEW
    assert found["prefixes"][1] < read / 2
    for way in WAYS:
        assert found[way][0] == plain, way
