"""What the layers of a model have, and which of them each pipeline stage holds."""

import pytest

from megarl.errors import UsageError
from megarl.mcore.model.pipeline_layout import (
    attention_layer_pattern,
    indexer_of,
    layer_kinds,
    moe_layer_pattern,
    prediction_kind,
    recurrent_layer_pattern,
    stage_layers,
)
from tests.helpers.models.tiny_models import CHOOSING, parse_roles

EXPERTS = "--num-layers 4 --num-experts 4 --moe-router-topk 2"


def args_of(flags: str, ranks: int = 1, shape: str = "llama"):
    return parse_roles(flags, ranks, shape)["actor"].megatron


@pytest.mark.parametrize("flags, expected", [
    ("", "0000"), (EXPERTS, "1111"), (f"{EXPERTS} --moe-layer-freq 2", "1010"),
    (f"{EXPERTS} --moe-layer-freq ([0]*1+[1]*3)", "0111"),
])  # fmt: skip
def test_layers_with_experts(flags, expected):
    assert moe_layer_pattern(args_of(f"--num-layers 4 {flags}")) == [digit == "1" for digit in expected]


def test_layers_have_attention_or_a_state_and_those_of_hybrids_one_half():
    recurrent, hybrid = args_of("--num-layers 4", shape="recurrent"), args_of("", shape="mamba")
    assert recurrent_layer_pattern(recurrent) == [True, False, True, False]
    assert attention_layer_pattern(recurrent) == [False, True, False, True]
    assert recurrent_layer_pattern(hybrid) == [True, False, False, True]
    assert attention_layer_pattern(hybrid) == [False, False, True, False]
    assert [(kind.has_mixer, kind.has_mlp) for kind in layer_kinds(hybrid)] == [
        (True, False), (False, True), (True, False), (True, False),
    ]  # fmt: skip
    assert all(kind.has_mixer and kind.has_mlp for kind in layer_kinds(recurrent))
    assert not prediction_kind(recurrent).is_recurrent and prediction_kind(args_of(EXPERTS)).is_moe


def test_layers_that_choose_keys_and_whose_choice_a_layer_uses():
    alone, some = (args_of(f"--num-layers 4 {CHOOSING} {flags}", 1, "latent") for flags in ("", SHARING))
    assert [kind.has_indexer for kind in layer_kinds(alone)] == [True] * 4
    assert [kind.has_indexer for kind in layer_kinds(some)] == [True, False, True, False]
    assert [indexer_of(some, number) for number in (1, 2, 3, 4, 5)] == [1, 1, 3, 3, 5]  # the last one predicts
    assert prediction_kind(some).has_indexer and not prediction_kind(args_of("", 1, "latent")).has_indexer
    assert not any(kind.has_indexer for kind in layer_kinds(args_of("", 1, "latent")))


@pytest.mark.parametrize("flags, stage, layer, source", [
    ("--decoder-first-pipeline-num-layers 1", 1, 1, 0), ("--decoder-last-pipeline-num-layers 1", 1, 3, 2),
    ("--num-virtual-stages-per-pipeline-rank 2", 0, 0, 0),
])  # fmt: skip
def test_a_stage_begins_with_a_layer_that_chooses(flags, stage, layer, source):
    wrong = f"{PP2} {CHOOSING} {SHARING} {flags}"
    with pytest.raises(UsageError) as error:
        args_of(wrong, 2, "latent")
    line = str(error.value)
    assert "\n" not in line and (f"stage {stage} begins with layer {layer}" in line or "virtual" in flags)
    assert "virtual" in flags or line.endswith(f"before this one layer {source}")
    args_of(f"{PP2} {CHOOSING} {SHARING}", 2, "latent")


SHARING = "--dsa-indexer-layers 1,0,1,0"
PP2 = "--num-layers 4 --pipeline-model-parallel-size 2"


@pytest.mark.parametrize("flags, expected", [
    ("--num-layers 4", [[(0, 4)]]),
    (PP2, [[(0, 2)], [(2, 4)]]),
    (f"{PP2} --decoder-first-pipeline-num-layers 1", [[(0, 1)], [(1, 4)]]),
    (f"{PP2} --num-virtual-stages-per-pipeline-rank 2", [[(0, 1), (2, 3)], [(1, 2), (3, 4)]]),
])  # fmt: skip
def test_stages_hold_layers_in_the_order_in_which_a_micro_batch_runs_through_them(flags, expected):
    found = stage_layers(args_of(flags, 2 if "pipeline" in flags else 1))
    assert [[(layers.start, layers.stop) for layers in stage] for stage in found] == expected
