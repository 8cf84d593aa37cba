"""What a plan prices without parsing again, or counts once, against runs that are parsed and counted anew."""

import pytest

from megarl.planning import layouts, memory, parameters, traffic
from megarl.planning.question import Question
from tests.helpers.models.tiny_models import LENGTHS, SHAPES
from tests.helpers.tiers import long

GRPO = f"{SHAPES['llama']} {LENGTHS} --advantage grpo --bf16 --rollout-buffer-gb 0.001 --max-tokens-per-microbatch 8192"
SHARDED = ("--use-distributed-optimizer",)
TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


def question_of(flags: str = "", ranks: int = 4) -> Question:
    """A run of the tiny model."""
    return Question(f"{GRPO} {flags}".split(), ranks, None, vocab_size=20)


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
