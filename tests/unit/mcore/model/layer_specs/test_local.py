"""The local layer spec: megarl's parts for each kind of layer, and none in place of a half that it lacks."""

import pytest
from megatron.core.transformer.identity_op import IdentityOp

from megarl.mcore.attention.backends import PackedAttention, ScoredAttention
from megarl.mcore.kernels.norm import build_norm
from megarl.mcore.model import decoder_layer as layers
from megarl.mcore.model.latent_attention import LatentAttention
from megarl.mcore.model.layer_specs.local import layer_spec
from megarl.mcore.model.pipeline_layout import layer_kinds
from megarl.mcore.model.recurrent_mixer import GatedDeltaNet, Mamba2
from megarl.mcore.moe.layer import Experts, MixtureLayer, SharedExperts
from megarl.mcore.moe.router import Router
from tests.helpers.models.tiny_models import parse_roles

MOE = "--num-experts 4 --moe-router-topk 2 --moe-shared-expert-intermediate-size 32"


def specs_of(flags: str, shape: str = "llama") -> list:
    """The specs of a model's layers."""
    args = parse_roles(flags, 1, shape)["actor"].megatron
    return [layer_spec(args, kind) for kind in layer_kinds(args)]


@pytest.mark.parametrize("flags, shape, layer, attention", [
    ("", "llama", layers.DecoderLayer, layers.PagedSelfAttention),
    (MOE, "llama", layers.DecoderLayer, layers.PagedSelfAttention),
    ("--attention-output-gate", "llama", layers.DecoderLayer, layers.PagedSelfAttention),
    ("--layernorm-position post", "llama", layers.PostNormLayer, layers.PagedSelfAttention),
    ("", "latent", layers.DecoderLayer, LatentAttention),
])  # fmt: skip
def test_layers_have_megarls_parts(flags, shape, layer, attention):
    spec = specs_of(flags, shape)[0]
    assert (spec.module, spec.submodules.self_attention.module) == (layer, attention)
    core = spec.submodules.self_attention.submodules.core_attention
    assert core is PackedAttention
    assert spec.submodules.input_layernorm is (IdentityOp if "post" in flags else build_norm)


def test_scores_with_a_softcap_have_a_core_attention_of_their_own():
    (spec, _) = specs_of("--attn-logit-softcapping 30")
    assert spec.submodules.self_attention.submodules.core_attention is ScoredAttention


def test_experts_are_megarls():
    mlp = specs_of(MOE)[0].submodules.mlp
    parts = mlp.keywords["submodules"]
    assert mlp.func is MixtureLayer and parts.router is Router
    assert (parts.experts.func, parts.shared_experts.func) == (Experts, SharedExperts)


def test_layers_with_one_half_have_nothing_in_place_of_the_other():
    first, mlp, attention, _ = (spec.submodules for spec in specs_of("", "mamba"))  # M-*M
    assert first.self_attention.module is Mamba2 and first.mlp is first.pre_mlp_layernorm is IdentityOp
    assert mlp.self_attention is mlp.input_layernorm is IdentityOp and mlp.mlp is not IdentityOp
    assert attention.self_attention.module is layers.PagedSelfAttention and attention.mlp is IdentityOp
    net, whole = (spec.submodules for spec in specs_of("", "recurrent"))
    assert net.self_attention.module is GatedDeltaNet and net.mlp is not IdentityOp is not whole.mlp
