"""`--transformer-impl local`: Megatron's local layers with megarl's attention, norms, MLP, experts and router."""

import dataclasses
import functools

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec

from megarl.mcore.kernels.norm import build_norm
from megarl.mcore.kernels.swiglu import SwiGLUMLP
from megarl.mcore.model.layer_specs import put_own_parts
from megarl.mcore.model.pipeline_layout import DENSE, LayerKind
from megarl.mcore.moe.layer import Experts, MixtureLayer, SharedExperts
from megarl.mcore.moe.router import Router

final_norm = build_norm  # after the last layer
MLP_NORM = "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"  # its name, and that in checkpoints


def layer_spec(args, kind: LayerKind = DENSE) -> ModuleSpec:
    """The spec of one decoder layer, for packed sequences in training and the paged KV cache or states in rollout.

    `args`: the role's Megatron namespace.
    """
    spec = get_gpt_layer_local_spec(
        num_experts=args.num_experts if kind.is_moe else None,
        moe_grouped_gemm=False,  # experts keep weights of their own; see `moe.layer`
        normalization=args.normalization,
        qk_layernorm=args.qk_layernorm,
        multi_latent_attention=args.multi_latent_attention,
    )
    layer, attention = spec.submodules, spec.submodules.self_attention
    put_own_parts(spec, args, kind)
    layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp if args.layernorm_position == "post" else build_norm
    if args.qk_layernorm and not kind.is_recurrent:
        names = ("q_layernorm", "kv_layernorm" if args.multi_latent_attention else "k_layernorm")
        for name in names:
            setattr(attention.submodules, name, build_norm)
    if args.multi_latent_attention:
        layer.sharded_state_dict_keys_map = dict([MLP_NORM])  # as of all models
    elif kind.is_recurrent:
        layer.sharded_state_dict_keys_map = dict([("input_layernorm.", "self_attention.in_proj.layer_norm_"), MLP_NORM])
    if not kind.is_moe:
        layer.mlp = functools.partial(SwiGLUMLP.as_mlp_submodule, **layer.mlp.keywords)
    else:
        parts = layer.mlp.keywords["submodules"]
        experts = functools.partial(Experts, **parts.experts.keywords)
        shared = functools.partial(SharedExperts, **parts.shared_experts.keywords)
        parts = dataclasses.replace(parts, router=Router, experts=experts, shared_experts=shared)
        layer.mlp = functools.partial(MixtureLayer, submodules=parts)
    _drop_absent_parts(spec, kind)
    return spec


def _drop_absent_parts(spec: ModuleSpec, kind: LayerKind):
    """Takes the half that a layer does not have, and its norm, out of a complete spec."""
    layer = spec.submodules
    if not kind.has_mixer:
        layer.input_layernorm = layer.self_attention = IdentityOp
        layer.self_attn_bda = IdentityFuncOp
    if not kind.has_mlp:
        layer.pre_mlp_layernorm = layer.mlp = IdentityOp
        layer.mlp_bda = IdentityFuncOp
