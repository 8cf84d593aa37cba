"""A rollout and an update on a CUDA device without hardware: nothing mixes devices, and little waits for the device."""

import pytest

from megarl.algorithms import ESTIMATORS
from tests.cuda_walk import algorithms, checks, moves, parallel, rollout, training
from tests.cuda_walk.cost import cases
from tests.cuda_walk.start import check_graphs, needs_compiler, walks

LAYERS, MICROBATCHES = 2, 2
ATTENTION = ("megarl.paged_decode", "torch_attn._varlen_attn")
BACKWARD = "torch_attn._varlen_attn_backward"

PLANNED_THERE = ["dense", "greedy", "experts", "window", "prefix caching", "eviction"]

pytestmark = [needs_compiler, pytest.mark.long]


MODULES = (rollout, training, moves, parallel, algorithms, checks, cases)


@pytest.fixture(scope="module")
def walked(tmp_path_factory) -> dict:
    """Counts by scenario; all are walked in one process."""
    names = {name for module in MODULES for name in module.SCENARIOS} - {"launches"}  # of test_walk_cost.py
    return walks(tmp_path_factory.mktemp("walk"), sorted(names))


def launches(counts: dict, names) -> int:
    return sum(counts["launches"].get(name, 0) for name in names)


def planned_on_device(steps: list[dict]) -> list[dict]:
    """The decode steps in which no prompt is read."""
    return [step for step in steps if not step["prefills"] and "megarl.sample_rows" in step["launches"]]


@pytest.mark.parametrize("name", [*PLANNED_THERE, "tensor parallel"])
def test_a_decode_step_has_one_launch_a_layer_two_copies_at_most_and_no_read_before_its_token(walked, name):
    steps = planned_on_device(walked[name])
    assert len(steps) >= 3
    for step in steps:
        assert launches(step, ATTENTION) == LAYERS and step["launches"]["megarl.sample_rows"] == 1
        # Its inputs, and either the sampled tokens for Megatron's end of requests, or cache blocks to be cleared.
        assert sum(step["sends"].values()) <= 2
        # Tokens with their log-probs, the routes, and the sampled tokens for Megatron's end of requests.
        assert sum(step["reads"].values()) <= (2 if name == "experts" else 1) + ends_requests(step)
    assert not all(map(ends_requests, steps))


def ends_requests(step: dict) -> bool:
    """Whether Megatron's controller reads the sampled tokens in a step, as it does when requests may end."""
    return any("inference/controller" in place for place in step["reads"])


def test_a_layer_of_a_decode_step_launches_few_kernels(walked):
    """Besides attention and four products: rotation with the cache write, SwiGLU, and two sums with their norms. At
    small batches a launch takes longer than its work. The first step makes rotary tables."""
    _, step, *_ = [step["launches"] for step in planned_on_device(walked["dense"])]
    assert step["aten.matmul"] == 4 * LAYERS and step["aten.mm"] == 1  # logits, in fp32
    assert step["aten.rms_norm"] == 1 and step["megarl.sum_norm"] == 2 * LAYERS
    assert step["megarl.rotate_and_store"] == step["megarl.swiglu_rows"] == LAYERS
    assert not {"aten.silu", "aten.cat", "aten.copy_", "aten._to_copy", "aten.clone"} & step.keys()


@pytest.mark.parametrize("name", ["graphs", "graphs, experts", "graphs, tensor parallel", "graphs, expert parallel"])
def test_decode_steps_are_captured_and_replayed(walked, name):
    """A capture breaks where something crosses between host and device within the step."""
    check_graphs(walked[name])


@pytest.mark.parametrize("name", rollout.SCENARIOS)
def test_no_step_reads_the_device_within_the_model(walked, name):
    reads = {place for step in walked[name] for place in step["reads"]}
    assert not [place for place in reads if place.startswith(("mcore/model", "mcore/attention", "mcore/kernels"))]


def test_queries_choose_keys_without_a_read_of_the_device(walked):
    """But for one in a micro-batch of an update, of the queries that are compared with their choice."""
    steps, kernels = walked["chosen keys"], ("choose_key_bits", "list_key_rows", "attend_rows")
    for kernel in kernels:
        assert sum(step["launches"].get(f"megarl.{kernel}", 0) for step in steps) >= LAYERS * len(steps) - LAYERS
    found = walked["update chosen keys"]
    assert not found["scores"]["reads"] and sum(found["optimizer"]["reads"].values()) == 1
    ((place, count),) = found["passes"]["reads"].items()
    assert "attention/latent_rows" in place and count == MICROBATCHES
    for kernel in kernels:
        assert found["scores"]["launches"][f"megarl.{kernel}"] == LAYERS * MICROBATCHES


UPDATES = [name for name in training.SCENARIOS if name not in ("update fp32", "update chosen keys")]


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_waits_for_the_device_once(walked, name):
    found = walked[name]
    assert not found["scores"]["reads"] and not found["passes"]["reads"]
    assert sum(found["optimizer"]["reads"].values()) == 1  # the norm
    assert not found["optimizer"]["sends"]
    forwards = LAYERS * MICROBATCHES
    assert launches(found["scores"], ATTENTION) == forwards
    assert launches(found["passes"], ATTENTION) == forwards * (2 if name == "update recompute" else 1)
    assert launches(found["passes"], [BACKWARD]) == forwards
    assert launches(found["scores"], ["megarl.split_heads"]) == forwards
    assert launches(found["passes"], ["megarl.split_heads"]) == forwards * (2 if name == "update recompute" else 1)
    assert launches(found["passes"], ["megarl.join_heads"]) == forwards
    assert launches(found["passes"], ["aten.cos"]) == MICROBATCHES  # tables that all layers share
    # Linear layers and the vocabulary head add to an fp32 gradient without a product in 16 bits; experts have products
    # of their own, and a critic another head.
    linears, heads = 2 if name == "update experts" else 4, name != "update critic"
    assert launches(found["passes"], ["aten.addmm"]) == linears * forwards + heads * MICROBATCHES
    assert sum(found["passes"]["sends"].values()) <= 2 * MICROBATCHES


def test_attention_has_few_shapes(walked):
    steps = walked["long"]
    assert len(steps) > 200 and len({shape for step in steps for shape in step["shapes"]}) <= 12


def test_offload_moves_each_block_once_and_leaves_nothing(walked):
    moved = walked["offload"]["moves"]
    assert moved["is_there"] and moved["left"] == 0
    assert list(moved["sends"].values()) == list(moved["reads"].values()) == [2]  # weights, optimizer states


def test_an_exchange_waits_for_the_headers_alone(walked):
    sent, received = walked["exchange"]["send"], walked["exchange"]["receive"]
    assert sum(sent["reads"].values()) <= 3 and sum(received["reads"].values()) <= 2


def test_grouped_experts_need_no_counts_on_the_host(walked):
    found = walked["update experts"]
    assert found["scores"]["launches"]["aten._grouped_mm"] == 2 * LAYERS * MICROBATCHES
    assert found["passes"]["launches"]["aten._grouped_mm"] == 6 * LAYERS * MICROBATCHES


def test_tensor_parallel_updates_wait_once_too(walked):
    found = walked["update tensor parallel"]
    assert not found["scores"]["reads"] and not found["passes"]["reads"]
    assert sum(found["optimizer"]["reads"].values()) == 1


def test_expert_parallel_ranks_wait_for_their_numbers_of_rows_alone(walked):
    found = walked["update expert parallel"]
    for kind in ("scores", "passes"):
        (place,) = found[kind]["reads"]
        assert place.startswith("mcore/moe/layer") and found[kind]["reads"][place] == LAYERS * MICROBATCHES
    assert found["passes"]["launches"]["aten._grouped_mm"] == 6 * LAYERS * MICROBATCHES


def test_an_expert_parallel_step_with_prompts_waits_once_a_layer_and_others_never(walked):
    of_prompts = [bool(step["prefills"]) for step in walked["expert parallel"]]
    assert True in of_prompts and False in of_prompts
    for step in walked["expert parallel"]:
        layers = {place: count for place, count in step["reads"].items() if place.startswith("mcore/moe")}
        assert list(layers.values()) == [LAYERS] * bool(step["prefills"]) and launches(step, ATTENTION) >= LAYERS


def test_stages_of_the_gpu_check_run_to_their_end(walked):
    """Their times mean nothing without a device."""
    assert [(row["model"], row["decode"], row["graphs"]) for row in walked["check decode"]] == [
        (model, count, has_graphs)
        for model in ("small", "experts", "recurrent")
        for count in (1, 3)
        for has_graphs in (True, False)
    ]
    assert all(row["launches"] == 0 for row in walked["check decode"])
    assert [row["update"] for row in walked["check update"]] == ["64 tokens", "experts", "recurrent"]


def test_work_is_that_of_the_shapes(walked):
    """Bytes of a decode step: the weights, keys and values, and little more; FLOPs of an update: 6 a parameter and
    token, 8 of the head, which computes the logits of response tokens twice; five products in attention's backward."""
    found = walked["cost"]
    decode, update = found[f"decode step of {cases.SEQUENCES}"], found["the last of an update of 512"]
    attention = cases.HIDDEN * cases.CHANNELS * (2 * cases.HEADS + 2 * cases.GROUPS)
    layers = cases.LAYERS * (attention + 3 * cases.HIDDEN * cases.FFN)
    head, tokens = cases.HIDDEN * cases.VOCAB, 512
    keys = cases.SEQUENCES * (cases.PROMPT + cases.RESPONSE // 2) * 2 * cases.GROUPS * cases.CHANNELS * cases.LAYERS
    assert 1 <= decode["bytes"] / (2 * (layers + head + keys)) < 1.1
    assert decode["eager"] == 0 and decode["calls"] == cases.RESPONSE
    assert 10 * cases.LAYERS < decode["in_graph"] <= 10 * cases.LAYERS + 14
    assert (decode["waits"], decode["sends"]) == (2, 2)  # the tokens, and the end of requests
    length = cases.PROMPT + cases.RESPONSE
    attended = 3.5 * 4 * tokens * cases.HIDDEN * (length + 1) / 2 * cases.LAYERS
    flops = 6 * layers * tokens + 8 * head * tokens * cases.RESPONSE / length + attended
    assert update["flops"] == pytest.approx(flops, rel=0.02) and update["waits"] == 0
    assert found["optimizer"]["waits"] == 1


def test_losses_never_wait_for_the_device_and_advantages_a_few_times_a_step(walked):
    """All policy losses, corrections, aggregations and KL estimators; all estimators of advantages, with metrics."""
    found = walked["algorithms"]
    assert len(found["losses"]) > 240 and not any(x["reads"] or x["sends"] for x in found["losses"].values())
    assert len(found["advantages"]) == len(ESTIMATORS) + 1 and not any(x["sends"] for x in found["advantages"].values())
    assert all(sum(x["reads"].values()) <= 40 for x in found["advantages"].values())
