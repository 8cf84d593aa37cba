"""What roles hold beside their own models: copies of weights on their way, and what a teacher gives."""

import pytest

from megarl import arguments
from megarl.errors import UsageError
from megarl.planning import layouts, memory, parameters, summary, traffic
from megarl.planning.summary import Question, cache_plan
from tests.helpers.models.tiny_models import CHOOSING, LENGTHS, SHAPES, VOCAB, join_actor
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

WEIGHTS = 2 * (8 * 16 * 64 + 4 * 16 * 64 + 3 * 64 * 128 + 2 * 64) + 64 + 32 * 64  # embedding and head are one
GRPO = (
    f"{SHAPES['llama']} {LENGTHS} --advantage grpo --kl-in loss --ppo-epochs 1 --prompts-per-step 2"
    " --samples-per-prompt 2 --bf16"
)


def test_sets_of_ranks_have_the_same_roles_and_roles_take_turns():
    flags = f"{GRPO} --role-map=actor=0-1;reward=2;reference=0-2;rollout=2"
    price = Question(flags.split(), 3, None, vocab_size=20).price()
    found = {each.roles: each for each in price.rank_sets}
    assert sum(each.ranks for each in price.rank_sets) == 3 and len(found) == 2
    actor, reference = (price.roles[name].largest for name in ("actor", "reference"))
    both = next(each for roles, each in found.items() if "actor" in roles)
    assert both.bytes == actor.resident + reference.resident + max(actor.transient, reference.transient)
    assert summary.sets_of(price.roles, 3) == price.rank_sets


def test_copies_of_the_weights_on_their_way_are_memory_of_the_actor():
    flags = f"{GRPO} --role-map=actor=0-1;reward=2;reference=2;rollout=2 --rollout-correction tis".split()
    plain, ahead = (Question([*flags, "--generation-lag", lag], 3, None, vocab_size=20).price() for lag in "03")
    one, other = (price.roles["actor"].largest for price in (plain, ahead))
    assert (one.sent_weights, other.sent_weights) == (0, 3 * 2 * WEIGHTS // 2) and WEIGHTS > 0
    assert other.resident - one.resident == other.total - one.total == other.sent_weights


def test_what_the_actor_has_of_its_teacher_is_memory_and_traffic():
    flags = f"{GRPO} --role-map=actor=0-1;reward=2;reference=2;teacher=2 --distill loss --reward exact-match"
    flags += " --actor-tensor-model-parallel-size 2"
    plain, taught = (
        Question([*flags.split(), *wide], 3, None, vocab_size=20).price()
        for wide in ([], ["--teacher-hidden-size", "128"])
    )
    one, other = (price.roles["actor"].largest for price in (plain, taught))
    step, state = traffic.step_sizes(taught.program.settings), 128 * 2
    assert other.teacher_data == state * (32 // 2 + 2 * step.tokens) == 2 * one.teacher_data
    assert other.resident - one.resident == other.total - one.total == other.teacher_data - one.teacher_data
    sent = [move for move in traffic.moves(taught.program.settings, taught.program.roles) if move.source == "teacher"]
    assert [move.fields for move in sent] == [["teacher_states"]]
    header = traffic.field_bytes([], step)
    assert traffic.field_bytes(sent[0].fields, step, state) - header == state * step.tokens


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


# -- what a plan prices without parsing again, or counts once, against runs that are parsed and counted anew -----------

SEARCHED = (
    f"{SHAPES['llama']} {LENGTHS} --advantage grpo --bf16 --rollout-buffer-gb 0.001 --max-tokens-per-microbatch 8192"
)
SHARDED = ("--use-distributed-optimizer",)
TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


def question_of(flags: str = "", ranks: int = 4) -> Question:
    """A run of the tiny model."""
    return Question(f"{SEARCHED} {flags}".split(), ranks, None, vocab_size=20)


@pytest.mark.parametrize("flags", [
    f"{PIPELINE} 2", "--max-tokens-per-microbatch 64", long(f"{PIPELINE} 2 {TENSOR} 2 --sequence-parallel"),
    long("--prompts-per-step 512 --samples-per-prompt 16 --rollout-max-requests 64"),
])  # fmt: skip
def test_questions_that_are_left_out_change_no_answer(flags):
    """The search prices other recomputations and larger caches without parsing; here each is parsed.

    Two stages have one layer each: there full recomputation needs more memory than none.
    """
    question = question_of(flags)
    needs = sorted(question.price(more).fullest.bytes for more in layouts.RECOMPUTE)
    if "microbatch 64" not in flags and PIPELINE in flags:
        assert question.price(layouts.FULL_RECOMPUTE).fullest.bytes > needs[0]
    for available in {edge + more for edge in needs for more in (-1, 10**7)}:
        for more in layouts.RECOMPUTE:
            slow = question.price(more)
            if slow.fullest.bytes <= available:
                break
        found = layouts.least_recompute(question, (), available, None)
        assert (found[0], found[1].rank_sets) == (more, slow.rank_sets)
        cache: tuple[str, ...] = ()
        while (now := slow.roles["rollout"].cache).rounds > 1:
            larger = ("--rollout-buffer-gb", f"{2 * slow.program.settings.rollout_buffer_gb:g}")
            priced = question.price((*more, *larger))
            then = priced.roles["rollout"].cache
            if priced.fullest.bytes > available or then.rounds >= now.rounds:
                break
            cache, slow = larger, priced
        flags_found, price = layouts._larger_cache(question, found[1], available)
        assert (flags_found, price.roles, price.rank_sets) == (cache, slow.roles, slow.rank_sets)


def test_what_is_recomputed_is_no_reason_to_count_weights_and_gradients_again():
    question, full = question_of(), ("--recompute-granularity", "full", "--recompute-method", "uniform",
                                     "--recompute-num-layers", "1")  # fmt: skip
    caches = (parameters._stage_weights, memory._persistent_of_stages, memory._largest_buffers,
              traffic._reduced_of_chunks)  # fmt: skip
    for cache in caches:
        cache.cache_clear()
    counted = [1, 2, 1, 1]  # the weights of all roles are the same; the reference has no gradients
    kept = question.price(SHARDED)
    assert [cache.cache_info().misses for cache in caches] == counted
    recomputed = question.price((*SHARDED, *full))
    assert [cache.cache_info().misses for cache in caches] == counted
    for cache in caches:
        cache.cache_clear()
    assert question.price((*SHARDED, *full)).roles == recomputed.roles != kept.roles
