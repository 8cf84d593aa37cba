"""Flags with patterns of parameter names, and the optimizer's: what is refused, and what the message says."""

import re

import pytest

from megarl import arguments
from megarl.errors import UsageError
from megarl.mcore.config.optimizer_flags import has_muon, multiplier
from megarl.planning import parameter_rules
from tests.helpers.models.tiny_models import LENGTHS, SHAPES

PP2 = "--pipeline-model-parallel-size 2"
EXPERTS = "--num-experts 4 --moe-router-topk 2"
HOST = "--optimizer-cpu-offload"
REFUSED = [  # flags, ranks, what the message says
    ("--freeze decoder.layer.0.*", 1, "actor: --freeze decoder.layer.0.*: names no parameter of the actor; "
     "nearest: decoder."),
    ("--freeze x", 1, "names no parameter of the actor; nearest: "),
    ("--freeze decoder.layers.2.*", 1, "--freeze decoder.layers.2.*: names no parameter"),
    ("--freeze output_layer.weight", 1, "names no parameter of the actor; nearest: "),  # it is tied
    ("--freeze *.local_experts.0.*", 1, "nearest: decoder.layers.*.mlp.experts."),
    ("--freeze *", 1, "--freeze *: leaves nothing to train"),
    ("--freeze decoder.* embedding.*", 1, "leaves nothing to train"),
    (f"{PP2} --freeze decoder.layers.0.* embedding.*", 2, "leaves nothing to train on pipeline stage 0; use fewer"),
    (f"{PP2} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --freeze decoder.layers.2.*", 2,
     "leaves nothing to train on pipeline stage 0"),
    ("--freeze embedding.* --lora-rank 2", 1, "--freeze: not allowed with low-rank factors"),
    ("--lr-multipliers *=2 --lora-rank 2", 1, "--lr-multipliers: not allowed with low-rank factors"),
    ("--lr-multipliers *.router.*=0.1", 1, "--lr-multipliers *.router.*=0.1: names no parameter"),
    ("--lr-multipliers embedding.*=2 *=0.5", 1, "--lr-multipliers embedding.*=2: has no effect: later patterns"),
    ("--lr-multipliers embedding.*=2 --freeze embedding.*", 1, "names only parameters that are not trained"),
    ("--lr-multipliers embedding.*", 1, "allowed is PATTERN=FACTOR with a factor of 0 or more"),
    ("--lr-multipliers embedding.*=-1", 1, "'embedding.*=-1': allowed is PATTERN=FACTOR"),
    ("--lr-multipliers embedding.*=inf", 1, "allowed is PATTERN=FACTOR"),
    ("--weight-decay-multipliers =3", 1, "'=3': allowed is PATTERN=FACTOR"),
    ("--weight-decay-multipliers *=2 --weight-decay 0", 1, "none without a --weight-decay above 0"),
    ("--freeze", 1, "--freeze: expected at least one argument"),
    ("--sgd-momentum 0.5", 1, "--sgd-momentum 0.5: allowed is none without --optimizer sgd"),
    ("--optimizer sgd --sgd-momentum 1", 1, "--sgd-momentum 1.0: allowed is from 0 to below 1"),
    ("--optimizer sgd --adam-beta2 0.9", 1, "--adam-beta2 0.9: allowed is none with --optimizer sgd"),
    ("--optimizer lion", 1, "--optimizer lion"),
    ("--exp-avg-dtype bf16", 1, "--exp-avg-dtype bf16: allowed is fp32 without --use-precision-aware-optimizer"),
    ("--use-precision-aware-optimizer", 1, "allowed is none without --exp-avg-dtype bf16 or --exp-avg-sq-dtype bf16"),
    ("--use-precision-aware-optimizer --exp-avg-dtype fp16", 1, "--exp-avg-dtype: invalid choice: 'fp16'"),
    ("--use-precision-aware-optimizer --exp-avg-sq-dtype fp8", 1, "--exp-avg-sq-dtype: invalid choice: 'fp8'"),
    ("--use-precision-aware-optimizer --exp-avg-sq-dtype bf16", 1, "--adam-beta2 0.999: allowed is at most 0.99 with"),
    ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --adam-beta1 0.995", 1, "--adam-beta1 0.995: allowed is at"),
    ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --optimizer sgd", 1, "none without --optimizer adam"),
    ("--main-params-dtype fp16", 1, "--main-params-dtype is a Megatron flag that megarl does not use"),
    (HOST, 1, "--optimizer-cpu-offload True: allowed is none without --use-distributed-optimizer"),
    (f"{HOST} --use-torch-fsdp2", 2, "--optimizer-cpu-offload True: allowed is none with --use-torch-fsdp2"),
    (f"{HOST} --optimizer sgd", 1, "--optimizer-cpu-offload True: allowed is none without --optimizer adam"),
    *((f"{HOST} --use-distributed-optimizer --optimizer-offload-fraction {fraction}", 1, "allowed is above 0, at most")
      for fraction in ("0", "1.5")),
    (f"{HOST} --use-distributed-optimizer --optimizer-offload-fraction nan", 1, "allowed is a finite number"),
    ("--optimizer-offload-fraction 0.5", 1, "fraction 0.5: allowed is none without --optimizer-cpu-offload"),
    ("--overlap-cpu-optimizer-d2h-h2d", 1, "allowed is none without --optimizer-cpu-offload"),
    ("--no-pin-cpu-grads", 1, "--no-pin-cpu-grads True: allowed is none without --optimizer-cpu-offload"),
    ("--no-pin-cpu-params", 1, "--no-pin-cpu-params is a Megatron flag that megarl does not use"),
    ("--muon-momentum 0.5", 1, "--muon-momentum 0.5: allowed is none without --optimizer muon"),
    ("--muon-no-split-qkv", 1, "--muon-no-split-qkv True: allowed is none without --optimizer muon"),
    *(("--optimizer muon", 1, "--optimizer muon: allowed is adam or sgd without the package emerging-optimizers; run "
       "bash "),) * (not has_muon()),
    *(row for row in (
        ("--optimizer muon --fp16", 1, "--fp16 True: allowed is none with --optimizer muon"),
        ("--optimizer muon --use-torch-fsdp2", 2, "--use-torch-fsdp2 True: allowed is none with --optimizer muon"),
        ("--optimizer muon --lora-rank 2", 1, "--optimizer muon: not allowed with low-rank factors"),
        ("--optimizer muon --tensor-model-parallel-size 4", 4, "allowed is at most --num-query-groups 2 with"),
        ("--optimizer muon --muon-momentum 1", 1, "--muon-momentum 1.0: allowed is from 0 to below 1"),
        ("--optimizer muon --muon-num-ns-steps 0", 1, "--muon-num-ns-steps 0: allowed is 1 or more"),
        ("--optimizer muon --muon-extra-scale-factor 0", 1, "allowed is above 0"),
        ("--optimizer muon --muon-coefficient-type cubic", 1, "allowed is one of simple, quintic,"),
        ("--optimizer muon --muon-fp32-matmul-prec low", 1, "--muon-fp32-matmul-prec: invalid choice: 'low'"),
        ("--optimizer muon --muon-scalar-optimizer lion", 1, "vectors, embeddings and heads are trained by Adam"),
    ) if has_muon()),
]  # fmt: skip


def checked(flags: str, size: int, program: str = "sft"):
    """The Megatron namespaces of a run's roles."""
    config = arguments.parse(f"{SHAPES['llama']} {LENGTHS} {flags}".split(), size, program)
    parameter_rules.check(config)
    return {name: role.megatron for name, role in config.roles.items()}


@pytest.mark.parametrize("flags, size, says", REFUSED)
def test_what_is_refused(flags, size, says):
    shape = f"{EXPERTS} " if "experts" in flags else ""
    with pytest.raises(UsageError, match=re.escape(says)) as found:
        checked(shape + flags, size)
    assert "\n" not in str(found.value) and len(str(found.value)) < 400


def test_a_hostile_pattern_is_matched_in_bounded_time():
    with pytest.raises(UsageError, match="names no parameter"):
        checked(f"--freeze {'*a' * 40}*b", 1)


@pytest.mark.parametrize("flags, size", [
    (f"{PP2} --freeze decoder.layers.0.*", 2),  # the embedding is trained
    ("--freeze embedding.word_embeddings.weight *.layers.0.mlp.*", 1),
    (f"{EXPERTS} --freeze *.router.weight --lr-multipliers *.mlp.experts.*=2", 1),
])  # fmt: skip
def test_what_is_allowed(flags, size):
    assert checked(flags, size)["actor"].freeze


def test_roles_have_patterns_of_their_own():
    flags = "--max-tokens-per-microbatch 96 --critic-freeze output_layer.* --actor-lr-multipliers *=3 *.mlp.*=0.5"
    roles = checked(flags, 1, "rl")
    actor, critic = roles["actor"], roles["critic"]
    assert (actor.freeze, critic.freeze, critic.lr_multipliers) == (None, ["output_layer.*"], None)
    assert multiplier(actor, "lr_multipliers", "decoder.layers.0.mlp.linear_fc1.weight") == 0.5
    assert multiplier(actor, "lr_multipliers", "decoder.final_layernorm.weight") == 3
    assert multiplier(actor, "weight_decay_multipliers", "decoder.final_layernorm.weight") == 1
