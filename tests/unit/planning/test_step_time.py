"""Estimated times of a step against values by hand, on a GPU with round numbers."""

from types import SimpleNamespace

import pytest

from megarl.planning import step_time
from megarl.planning.step_time import BANDWIDTH_SHARE, GPU, LATENCY, Cluster
from megarl.planning.summary import Question
from tests.helpers.models.tiny_models import LENGTHS, SHAPES

FLOPS = 5e11  # half of the sheet's
WEIGHTS = 2 * (8 * 16 * 64 + 4 * 16 * 64 + 3 * 64 * 128 + 2 * 64) + 64 + 32 * 64  # embedding and head are one
ATTENTION = 2 * 4 * 2 * 16  # FLOPs of a token for each token of its sequence: layers, heads, channels of key and value
TOKEN_CACHE = 2 * 2 * 2 * 16 * 2  # bytes: layers, key and value, groups, channels, 16 bits
GRPO = (
    f"{SHAPES['llama']} {LENGTHS} --advantage grpo --kl-in loss --ppo-epochs 1 --prompts-per-step 2"
    " --samples-per-prompt 2 --bf16"
)
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 36 --moe-router-topk 2 --moe-router-load-balancing-type none"


def price_of(flags: str, ranks: int = 1):
    """What a run with these flags needs."""
    return Question(f"{GRPO} {flags}".split(), ranks, None, vocab_size=20).price()


def cluster_of(bandwidth: float = 1e11, ranks_per_node: int = 8, link: float = 1e9) -> step_time.Cluster:
    """GPUs of so many bytes per second of memory and of links."""
    return step_time.Cluster("test", step_time.GPU(80, 2 * FLOPS, bandwidth, link), 0.5, 1e7, ranks_per_node)


def estimate(flags: str = "", ranks: int = 1, **of_cluster):
    """The estimate; `of_cluster` as of `cluster_of`."""
    found = step_time.estimate(price_of(flags, ranks), cluster_of(**of_cluster))
    assert found is not None
    return found


def decode(flags: str, ranks: int = 1, **of_cluster) -> float:
    """Seconds of a decode step of the rollout."""
    price = price_of(flags, ranks)
    args = price.program.roles["rollout"].megatron
    step = step_time.traffic.step_sizes(price.program.settings)
    return step_time.decode_seconds(args, price.roles["rollout"], step, cluster_of(**of_cluster))


def forward(tokens: float, length: float) -> float:
    """Seconds of a forward by hand."""
    return tokens * (2 * WEIGHTS + ATTENTION * length) / FLOPS


def test_a_step_on_one_rank():
    """Four sequences of 24 + 24 tokens; one update, which needs no forward for old log-probs."""
    found, all_tokens = estimate(), forward(4 * 48, 48)
    assert found["scoring"] == pytest.approx(all_tokens)  # the reference
    assert found["updates"] == pytest.approx(3 * all_tokens)
    read = (2 * WEIGHTS + 4 * 36 * TOKEN_CACHE) / (BANDWIDTH_SHARE * 1e11)
    assert found["generation"] == pytest.approx(24 * read + forward(2 * 24, 24))
    assert found["total"] == found["generation"] + found["scoring"] + found["updates"] and found["weights"] == 0
    again = estimate("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    assert again["updates"] == pytest.approx(4 * all_tokens) and again["scoring"] == found["scoring"]


def test_a_pipeline_idles_for_a_stage_in_all_micro_batches():
    flags = "--pipeline-model-parallel-size 2 --max-tokens-per-microbatch 48"
    found = estimate(flags, 2, link=1e20)
    assert found["updates"] == pytest.approx(3 * forward(4 * 48, 48) / 2 * (1 + 1 / 4))


def test_decoding_computes_or_reads_whichever_takes_longer():
    assert decode("", bandwidth=1e15) == pytest.approx(forward(4, 2 * 36))
    assert decode("", bandwidth=1e9) > 10 * forward(4, 2 * 36)


def test_a_small_cache_takes_more_rounds():
    """A cache of two sequences reads the weights for each two."""
    small = estimate(f"--rollout-buffer-gb {3 * 64 * TOKEN_CACHE / 2**30}")
    read = (2 * WEIGHTS + 2 * 36 * TOKEN_CACHE) / (BANDWIDTH_SHARE * 1e11)
    assert small["generation"] == pytest.approx(2 * 24 * read + forward(2 * 24, 24))


def test_collectives_of_a_decode_step_have_a_latency():
    """Two of a dense layer over tensor ranks, two of a layer with experts; a pipeline's stages take turns."""
    fast = {"bandwidth": 1e20}
    computed = decode("", 1, **fast)
    assert decode("--tensor-model-parallel-size 2", 2, **fast) == pytest.approx(computed / 2 + 4 * LATENCY)
    assert decode("--pipeline-model-parallel-size 2", 2, **fast) == pytest.approx(computed + LATENCY)
    alone = decode(f"{EXPERTS}", 1, **fast)
    assert decode(f"{EXPERTS} --expert-model-parallel-size 2", 2, **fast) == pytest.approx(alone / 2 + 4 * LATENCY)


def test_experts_that_no_token_is_routed_to_are_not_read():
    """Two of four experts a token: four tokens read 15/16 of them."""
    experts = 2 * 4 * 3 * 64 * 36
    dense = WEIGHTS - 2 * 3 * 64 * 128 + 2 * 4 * 64  # with routers
    read = 2 * (dense + 15 / 16 * experts) + 4 * 36 * TOKEN_CACHE
    assert decode(EXPERTS, bandwidth=1e9) == pytest.approx(read / (BANDWIDTH_SHARE * 1e9))


def test_groups_that_leave_a_node_use_the_network():
    inside, across = (estimate("--tensor-model-parallel-size 2", 2, ranks_per_node=size) for size in (2, 1))
    compute = 3 * forward(4 * 48, 48) / 2
    assert (
        across["updates"] - compute == pytest.approx(100 * (inside["updates"] - compute))
        and inside["updates"] > compute
    )


def test_a_rollout_of_its_own_receives_weights_and_may_work_ahead():
    flags = "--role-map actor=0;reward=1;reference=1;rollout=1 --generation-lag 1 --rollout-correction tis"
    found = estimate(flags.replace("role-map ", "role-map="), 2)
    assert found["weights"] == pytest.approx(2 * WEIGHTS / (BANDWIDTH_SHARE * 1e9))
    assert found["ahead"]
    assert found["total"] == pytest.approx(
        max(found["generation"], found["scoring"] + found["updates"]) + found["weights"]
    )


def test_models_of_32_bits_have_no_estimate():
    price = Question(GRPO.replace("--bf16", "").split(), 1, None, vocab_size=20).price()
    assert step_time.estimate(price, cluster_of()) is None
    assert "32 bits" in step_time.text(None)


CLUSTER = Cluster("test", GPU(80, 1e15, 2e12, 4e11), 0.5, 5e10, 8)


def test_links_between_nodes_are_slower_than_in_them():
    assert CLUSTER.speed(8) == BANDWIDTH_SHARE * 4e11 and CLUSTER.speed(9) == BANDWIDTH_SHARE * 5e10
    assert CLUSTER.flops == 5e14 and "50% of 1000 TFLOPS" in CLUSTER.assumptions


def test_experts_spread_over_as_many_nodes_as_their_ranks_need():
    sizes = dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"), 1)

    def nodes(expert: int, tensor: int) -> int:
        args = SimpleNamespace(**sizes, expert_model_parallel_size=expert, expert_tensor_parallel_size=tensor)
        return step_time.expert_nodes(args, 8)

    assert [nodes(1, 4), nodes(8, 1), nodes(8, 2), nodes(12, 1)] == [1, 1, 2, 2]
