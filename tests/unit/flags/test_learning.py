"""Flags of learning: combinations that are refused, and the low-rank factors of each role."""

import pytest

from megarl.errors import UsageError
from megarl.flags import learning
from megarl.mcore.lora.targets import (
    ALL_LINEAR,
    GATE_TARGETS,
    IN_PROJ_TARGETS,
    LATENT_TARGETS,
    RECURRENT_TARGETS,
    TARGETS,
    LoRASettings,
)
from tests.helpers.flag_rules import check_rules
from tests.helpers.models.tiny_models import parse_roles

WRONG = {
    "large mini-batch": ("--minibatch-size 65", "--minibatch-size 65: allowed is at most --prompts-per-step × --sam"),
}  # fmt: skip


def test_each_rule_refuses_a_case_in_its_words():
    check_rules([learning], WRONG)


def lora_of(flags: str, role: str = "actor", size: int = 1, shape: str = "llama", program: str = "rl"):
    return parse_roles(f"--max-tokens-per-microbatch 96 {flags}", size, shape, program)[role].lora


def test_names_of_targets():
    assert learning.TARGETS == TARGETS and learning.ALL_LINEAR == ALL_LINEAR
    assert learning.are_targets("v_proj, q_proj") and learning.are_targets("all-linear")
    assert not learning.are_targets("q_proj;k_proj") and not learning.are_targets("")


def test_without_a_rank_a_role_trains_its_weights():
    assert lora_of("") is None


def test_defaults():
    targets = tuple(name for name in TARGETS if name not in LATENT_TARGETS + GATE_TARGETS + RECURRENT_TARGETS)
    assert lora_of("--lora-rank 8") == LoRASettings(8, 8.0, False, targets)
    assert lora_of("--lora-rank 8", shape="gpt2").targets == tuple(name for name in targets if name != "gate_proj")
    others = ("q_proj", "k_proj", "v_proj", *GATE_TARGETS, *RECURRENT_TARGETS)
    of_latents = tuple(name for name in TARGETS if name not in others)
    assert lora_of("--lora-rank 8 --lora-targets all-linear", shape="latent").targets == of_latents
    assert lora_of("--lora-rank 8", shape="recurrent").targets == (*targets, *IN_PROJ_TARGETS, "out_proj")
    of_keys = "in_proj_q in_proj_k in_proj_v in_proj_b g_a_proj g_b_proj f_a_proj f_b_proj out_proj"
    assert lora_of("--lora-rank 8", shape="kimi").targets[-9:] == (*of_keys.split(),)
    assert lora_of("--lora-rank 8", shape="ling").targets[-8:] == ("g_proj", *IN_PROJ_TARGETS, "out_proj")
    of_spaces = tuple(name for name in targets if name != "gate_proj")
    assert lora_of("--lora-rank 8", shape="mamba").targets == (*of_spaces, "in_proj", "out_proj")
    few = "--hybrid-layer-pattern MM --num-layers 2"
    assert lora_of(f"--lora-rank 8 {few}", shape="mamba").targets == ("in_proj", "out_proj")


def test_values():
    flags = "--lora-rank 8 --lora-alpha 32 --lora-rslora --lora-targets v_proj,q_proj"
    assert lora_of(flags) == LoRASettings(8, 32.0, True, ("q_proj", "v_proj"))
    assert lora_of(flags, program="sft") == lora_of(flags)


def test_roles_differ_and_only_trained_ones_have_factors():
    flags = "--lora-rank 8 --critic-lora-rank 2 --critic-lora-targets o_proj --reward exact-match"
    assert lora_of(flags).rank == 8 and lora_of(flags, "critic") == LoRASettings(2, 2.0, False, ("o_proj",))
    assert lora_of(flags, "reference") is None and lora_of("--actor-lora-rank 4", "critic") is None
    assert lora_of(flags, "rollout") == lora_of(flags)  # it runs on the actor's model


@pytest.mark.parametrize("flags, size, says", [
    ("--lora-rank 0", 1, "--lora-rank 0: allowed is a number above 0"),
    ("--lora-rank 4 --lora-targets lm_head", 1, "--lora-targets lm_head: allowed is all-linear, or names"),
    ("--lora-rank 4 --lora-targets embed_tokens,q_proj", 1, "--lora-targets embed_tokens,q_proj: allowed is"),
    ("--lora-alpha 4", 1, "--lora-alpha 4.0: needs --lora-rank"),
    ("--lora-rslora", 1, "--lora-rslora True: needs --lora-rank"),
    ("--lora-adapter somewhere", 1, "--lora-adapter somewhere: the actor needs --hf-model"),
])  # fmt: skip
def test_what_is_refused(flags, size, says):
    with pytest.raises(UsageError) as error:
        lora_of(flags, size=size)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("shape, name, needs", [
    ("llama", "q_a_proj", "--multi-latent-attention"), ("llama", "kv_b_proj", "--multi-latent-attention"),
    ("llama", "in_proj_z", "--experimental-attention-variant"), ("llama", "in_proj", "--hybrid-layer-pattern"),
    ("llama", "out_proj", "--experimental-attention-variant or --hybrid-layer-pattern"),
    ("recurrent", "in_proj", "--hybrid-layer-pattern"), ("mamba", "in_proj_z", "--experimental-attention-variant"),
    ("kimi", "in_proj_z", "no --linear-gate-rank"), ("ling", "f_a_proj", "--linear-gate-rank"),
    ("latent", "g_proj", "--multi-latent-attention and --attention-output-gate"),
    ("latent", "q_proj", "no --q-lora-rank"), ("latent", "v_proj", "no --multi-latent-attention"),
])  # fmt: skip
def test_targets_are_those_of_the_models_attention(shape, name, needs):
    with pytest.raises(UsageError, match=f"the actor has no {name}, which needs {needs}"):
        lora_of(f"--lora-rank 4 --lora-targets o_proj,{name}", shape=shape)


@pytest.mark.parametrize("pattern, name, needs", [("M-M-", "q_proj", r"a \* in"), ("M*M*", "up_proj", "a - or E in")])
def test_targets_are_those_of_the_models_layers(pattern, name, needs):
    with pytest.raises(UsageError, match=f"has no {name}, which needs {needs} --hybrid-layer-pattern"):
        lora_of(f"--lora-rank 4 --lora-targets in_proj,{name} --hybrid-layer-pattern {pattern}", shape="mamba")


def test_a_model_without_gates_has_no_gate_proj():
    with pytest.raises(UsageError, match="the actor has no gate_proj"):
        lora_of("--lora-rank 4 --lora-targets gate_proj", shape="gpt2")
