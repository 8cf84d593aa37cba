"""The search for layouts: known best ones, given sizes, recomputation and cache only as needed, none that fits."""

import itertools

import pytest

from megarl.errors import UsageError
from megarl.planning import layouts, step_time, verdict
from megarl.planning.memory import GIB
from megarl.planning.summary import Question
from tests.helpers.models.tiny_models import LENGTHS, SHAPES

CLUSTER = step_time.Cluster("test", step_time.GPU(80, 1e12, 1e11, 1e9), 0.5, 1e8, 4)
GRPO = f"{SHAPES['llama']} {LENGTHS} --advantage grpo --bf16 --rollout-buffer-gb 0.001 --max-tokens-per-microbatch 8192"
SHARDED = ("--use-distributed-optimizer",)
TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


def question_of(flags: str = "", ranks: int = 4) -> Question:
    """A run of the tiny model."""
    return Question(f"{GRPO} {flags}".split(), ranks, None, vocab_size=20)


def search(question: Question, available: float = GIB) -> dict:
    """The layouts for GPUs with so many bytes for a plan."""
    return layouts.best_layouts(question, CLUSTER, available / GIB / (1 - verdict.RESERVE))


def test_with_enough_memory_replicas_are_best_and_nothing_is_recomputed():
    found = search(question_of())
    assert found["best"][0]["flags"] == SHARDED
    assert found["legal"] == found["fitting"] == 5  # TP and PP of 1 and 2 for two layers, and TP of 4
    seconds = [layout["seconds"] for layout in found["best"]]
    assert seconds == sorted(seconds) and len(seconds) == layouts.SHOWN


def test_the_best_is_that_of_all_layouts_tried_one_by_one():
    """Memory that replicas do not have, even with full recomputation: of the others, the fastest that fits."""
    question, tried = question_of(), {}
    for tensor, pipeline, again in itertools.product((1, 2), (1, 2), layouts.RECOMPUTE):
        flags = (TENSOR, str(tensor), PIPELINE, str(pipeline), *SHARDED, *again)
        price = question.price((*flags, "--sequence-parallel") if tensor > 1 else flags)
        tried[tensor, pipeline, again] = price.fullest.bytes, step_time.estimate(price, CLUSTER)["total"]
    available = tried[1, 1, verdict.FULL_RECOMPUTE][0] - 1
    fits = {key: value for key, value in tried.items() if value[0] <= available}
    needed = {key: min((k for k in fits if k[:2] == key), key=lambda k: layouts.RECOMPUTE.index(k[2]), default=None)
              for key in itertools.product((1, 2), (1, 2))}  # fmt: skip
    assert needed[1, 1] is None and len(fits) > 1
    best = min((fits[key] for key in needed.values() if key), key=lambda value: value[1])
    first = search(question, available)["best"][0]
    assert (first["bytes"], first["seconds"]) == best


def test_activations_are_recomputed_as_little_as_the_memory_allows():
    question = question_of()
    needs = [question.price(flags).fullest.bytes for flags in layouts.RECOMPUTE]
    assert sorted(needs, reverse=True) == needs and len(set(needs)) == 3
    for more, bytes_ in zip(layouts.RECOMPUTE, needs, strict=True):
        found, price = layouts.least_recompute(question, (), bytes_, None)
        assert (found, price.fullest.bytes) == (more, bytes_)
    assert layouts.least_recompute(question, (), needs[-1] - 1, None)[0] == verdict.FULL_RECOMPUTE
    assert layouts.least_recompute(question, (), 0, "full")[0] == ()


def test_sizes_that_are_given_stay():
    found = search(question_of(f"{TENSOR} 2"))
    assert {layout["flags"][:2] for layout in found["best"]} == {(TENSOR, "2")}


def test_the_cache_takes_memory_that_is_left_until_one_round_is_enough():
    """32 responses of a replica: 16 blocks of 64 tokens hold 15 of them, 32 hold 31, 64 all."""
    sizes = "--prompts-per-step 32 --samples-per-prompt 4 --rollout-buffer-gb"
    small = 16 * 64 * 256 / GIB
    found = search(question_of(f"{sizes} {small!r}"))
    assert found["best"][0]["flags"] == (*SHARDED, "--rollout-buffer-gb", f"{4 * small:g}")


def test_if_none_fits_the_closest_is_named():
    found = search(question_of(), 1000)
    assert found["best"] == [] and found["fitting"] == 0 and found["closest"]["bytes"] > 1000
    assert set(verdict.FULL_RECOMPUTE) < set(found["closest"]["flags"])
    text = layouts.text(found, CLUSTER)
    assert "None of" in text and " ".join(found["closest"]["flags"]) in text


def test_stages_that_do_not_divide_the_layers_end_with_a_smaller_one():
    found = search(question_of("--num-layers 3", 2))
    uneven = (PIPELINE, "2", "--decoder-last-pipeline-num-layers", "1")
    assert found["legal"] == 3 and any(layout["flags"][:4] == uneven for layout in found["best"])


@pytest.mark.parametrize("flags, says", [
    (f"{TENSOR} 3", "--tensor-model-parallel-size"), (f"{PIPELINE} 3", "--pipeline-model-parallel-size"),
])  # fmt: skip
def test_if_the_run_refuses_every_layout_its_reason_is_the_error(flags, says):
    with pytest.raises(UsageError, match=says):
        search(question_of(flags))
