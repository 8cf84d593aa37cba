"""`--exact-rollout` on a CUDA device without hardware: from token to log-prob every row has a result of its own."""

import pytest

from tests.cuda_walk import exact
from tests.cuda_walk.start import check_graphs, needs_compiler, walks

LAYERS, MICROBATCHES = 2, 2
PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.matmul", "aten.linear", "aten.mv",
            "aten._grouped_mm"}  # fmt: skip
NORMS = {"aten._fused_rms_norm", "aten.native_layer_norm", "aten.rms_norm", "aten.layer_norm"}
ATTENTION = {"aten._scaled_dot_product_flash_attention", "aten.scaled_dot_product_attention",
             "aten._scaled_dot_product_cudnn_attention", "torch_attn._varlen_attn"}  # fmt: skip
ADDING = {"aten.index_add", "aten.index_add_", "aten.scatter_add", "aten.scatter_add_"}  # in no fixed order
ROLLOUTS = [name for name in exact.SCENARIOS if "rollout" in name and "graphs" not in name]
UPDATES = [name for name in exact.SCENARIOS if "update" in name]

pytestmark = [needs_compiler, pytest.mark.long]


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """Counts by scenario."""
    return walks(tmp_path_factory.mktemp("walk"), [*exact.SCENARIOS])


def others(launches: dict) -> set[str]:
    """The operators that an exact forward pass may not run."""
    return {*launches} & (PRODUCTS | NORMS | ATTENTION | ADDING)


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_rollout_runs_only_kernels_of_rows(walked, name):
    for step in walked[name]:
        found = step["launches"]
        assert not others(found)
        assert found["megarl.fixed_tile_product"] >= 4 * LAYERS + 1 and found["megarl.norm_rows"] == 4 * LAYERS + 1
        attended = found.get("megarl.paged_decode", 0) + found.get("megarl.packed_attention", 0)
        assert LAYERS <= attended <= 2 * LAYERS and {"megarl.sample_rows", "megarl.row_logprobs"} & {*found}


@pytest.mark.parametrize("name", UPDATES)
def test_trainings_forward_runs_the_same_kernels_and_backward_others(walked, name):
    scores, passes = (walked[name][part]["launches"] for part in ("scores", "passes"))
    assert not others(scores)
    for found in (scores, passes):
        assert found["megarl.packed_attention"] == LAYERS * MICROBATCHES
        assert found["megarl.norm_rows"] == (4 * LAYERS + 1) * MICROBATCHES
        assert found["megarl.row_logprobs"] == MICROBATCHES
    products = scores["megarl.fixed_tile_product"]
    assert passes["megarl.fixed_tile_product"] == products + MICROBATCHES  # backward computes the logits again
    assert products >= (4 * LAYERS + 1) * MICROBATCHES
    assert passes["aten._flash_attention_backward"] == LAYERS * MICROBATCHES
    assert not {*passes} & (NORMS | ATTENTION) and passes["aten.mm"] > 0


def test_decode_steps_are_captured_and_replayed(walked):
    check_graphs(walked["exact rollout, graphs"])
