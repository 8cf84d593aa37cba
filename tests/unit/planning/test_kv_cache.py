"""The planned KV cache against the engine's own, and the sequences that it holds."""

import pytest

from megarl import arguments
from megarl.errors import UsageError
from megarl.planning import traffic
from megarl.planning.kv_cache import cache_plan
from tests.helpers.models.tiny_models import CHOOSING, SHAPES, VOCAB, join_actor
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
UNEVEN = f"{PP2} --num-layers 3 --decoder-first-pipeline-num-layers 1"
CASES = [("", "llama", 1), ("--bf16", "gpt2", 1), (TP2, "llama", 2), (TP2, "latent", 2), (UNEVEN, "llama", 2),
         ("--bf16", "recurrent", 1), (TP2, "recurrent", 2), (UNEVEN, "recurrent", 2), (f"{TP2} --bf16", "mamba", 2),
         (TP2, "kimi", 2), (UNEVEN, "ling", 2),
         (f"{TP2} --num-query-groups 1", "llama", 2),
         (f"{CHOOSING} --dsa-indexer-layers 1,0,1,0 --num-layers 4 {PP2}", "latent", 2),
         (f"{CHOOSING} --dsa-indexer-layers 1,1,0 {UNEVEN}", "latent", 2)]  # fmt: skip


def sizes_of_engine(
    rank: int, flags: str, shape: str, caching: bool = False, snapshots: int | None = None, predicts: bool = False
) -> tuple[int, int]:
    """(bytes of a token, tokens of the cache's blocks) of the engine on this rank, with the blocks of a GPU."""
    from megarl.mcore.inference import engine as engine_module
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.model.prediction_layer import PredictionLayer
    from tests.helpers.rollout.engines import make_engine

    engine_module.BLOCK_TOKENS = 64
    assert join_actor(flags, shape)[1].is_member
    engine, model, place = make_engine(flags, shape, buffer_gb=0.01, prefix_caching=caching, snapshots=snapshots)
    if predicts:
        layer = PredictionLayer(join_actor(flags, shape)[0], place.pg_collection)
        sizes = VOCAB, 48, 0.01, 32
        engine = RolloutEngine(model, place.pg_collection, *sizes, speculative=True, prediction=layer)
    assert engine.context.memory_buffer.nbytes == engine.context.kv_block_allocator.total_count * (
        engine.context.block_size_bytes
    )
    return engine.context.block_size_bytes // 64, engine.capacity


def planned(flags: str, shape: str, ranks: int, lengths: str = "24 24"):
    """The cache plan of a run with these flags."""
    prompt, response = lengths.split()
    text = f"{SHAPES[shape]} --max-prompt-length {prompt} --max-response-length {response} --advantage grpo {flags}"
    program = arguments.parse(text.split(), ranks)
    return cache_plan(program.roles["rollout"], program.settings, traffic.step_sizes(program.settings))


@pytest.mark.parametrize("flags, shape, ranks", CASES)
def test_tokens_and_their_bytes_are_those_of_the_engine(flags, shape, ranks):
    """Grouped queries, latents, 16 bits, tensor ranks, and the stage with most layers, whose blocks all stages have."""
    check_sizes(flags, shape, ranks, "", False, None)


@pytest.mark.parametrize("flags, ranks, more, snapshots", [
    (TP2, 2, "", None), ("--bf16", 1, "--rollout-state-snapshots 7", 7),
    long((UNEVEN, 2, "--rollout-state-snapshots 7", 7)),
])  # fmt: skip
def test_states_at_ends_of_prompts_take_their_part_of_the_buffer(flags, ranks, more, snapshots):
    check_sizes(flags, "recurrent", ranks, f"--rollout-prefix-caching {more}", True, snapshots)


def check_sizes(flags: str, shape: str, ranks: int, more: str, caching: bool, snapshots: int | None):
    found = run_world(sizes_of_engine, ranks, flags, shape, caching, snapshots)
    cache = planned(f"{flags} --rollout-buffer-gb 0.01 --rollout-max-requests 32 {more}", shape, ranks)
    assert cache.token_bytes == max(each for each, _ in found) > 0
    assert {tokens for _, tokens in found} == {cache.tokens}


PREDICTS = [("--bf16", "recurrent"), ("", "latent"), ("", "llama"), (f"{CHOOSING} --dsa-indexer-layers 1,0", "latent")]


@pytest.mark.parametrize("flags, shape", PREDICTS)
def test_a_layer_that_drafts_has_keys_and_values_too(flags, shape):
    ((each, tokens),) = run_world(sizes_of_engine, 1, flags, shape, False, None, True)
    more = "--rollout-buffer-gb 0.01 --rollout-max-requests 32 --mtp-train --mtp-drafts"
    cache = planned(f"{flags} {more}", shape, 1)
    assert (cache.token_bytes, cache.tokens) == (each, tokens)


def test_sequences_and_rounds_of_a_replica():
    """512 bytes of a token in fp32 with two layers, two groups of 16 channels: 32 KiB of a block of 64 tokens."""
    sizes = "--prompts-per-step 10 --samples-per-prompt 4"
    cache = planned(f"{sizes} --rollout-buffer-gb {17 * 2**15 / 2**30}", "llama", 2, "64 66")
    assert cache.token_bytes == 512 and cache.tokens == 16 * 64  # one block of 17 is Megatron's
    assert (cache.longest, cache.full_length, cache.decoded) == (130, 5, 5)  # three blocks each
    assert (cache.responses, cache.rounds) == (20, 4)
    more = planned(f"{sizes} --advantage remax --greedy-baseline --rollout-buffer-gb 1", "llama", 2, "64 66")
    assert (more.responses, more.decoded, more.rounds) == (25, 25, 1)
    capped = planned(f"{sizes} --rollout-buffer-gb 1 --rollout-max-requests 9", "llama", 2, "64 66")
    assert (capped.decoded, capped.rounds) == (9, 3)
    with pytest.raises(UsageError, match="holds one sequence of 128 tokens; .* is 130"):
        planned(f"--rollout-buffer-gb {3 * 2**15 / 2**30}", "llama", 2, "64 66")
