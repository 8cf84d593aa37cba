"""`--transformer-impl transformer_engine`: Megatron's Transformer Engine layers with megarl's attention and router.

Linear layers, norms, the norms fused with linear layers, and grouped experts are Transformer Engine's. Parameters have
its names; checkpoints, weight transfer and Hugging Face's files use those of `local`, so that either loads the other's.
"""

import dataclasses
import functools

import torch
import transformer_engine.pytorch as te
from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec

from megarl.mcore import device
from megarl.mcore.model.layer_specs import put_own_parts
from megarl.mcore.model.pipeline_layout import DENSE, LayerKind
from megarl.mcore.moe.router import Router


class _WithoutExtraState(torch.nn.Module):
    """Keeps the state of fp8 out of checkpoints of norms, which have none: those of `local` could not be loaded."""

    get_extra_state, set_extra_state = torch.nn.Module.get_extra_state, torch.nn.Module.set_extra_state


class _RMSNorm(_WithoutExtraState, te.RMSNorm):
    """x [T, 1, H] -> x · r · weight, or · (1 + weight), with r = (mean x² + ε)^−½ (1910.07467 eq. 4)."""


class _LayerNorm(_WithoutExtraState, te.LayerNorm):
    """x [T, 1, H] -> (x − mean x) · r · weight + bias with r = (var x + ε)^−½ (1607.06450)."""


def final_norm(config, hidden_size: int, eps: float = 1e-5, **_) -> torch.nn.Module:
    """Transformer Engine's norm of a config, of the last layer and others, as `kernels.norm.build_norm`."""
    kind = {"RMSNorm": _RMSNorm, "LayerNorm": _LayerNorm}[config.normalization]
    on = {"sequence_parallel": config.sequence_parallel, "dtype": config.params_dtype, "device": device.device()}
    return kind(hidden_size, eps=eps, zero_centered_gamma=config.layernorm_zero_centered_gamma, **on)


class GroupedMixture(MoELayer):
    """Megatron's MoE layer with Transformer Engine's grouped experts."""

    reads_host = True  # their products take the numbers of rows from the host


def layer_spec(args, kind: LayerKind = DENSE) -> ModuleSpec:
    """The spec of one decoder layer, as that of `local`. `args`: the role's Megatron namespace."""
    is_moe = kind.is_moe
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=args.num_experts if is_moe else None, moe_grouped_gemm=True, qk_layernorm=args.qk_layernorm
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    put_own_parts(spec, args, kind)
    if args.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = final_norm
    layer.sharded_state_dict_keys_map = {}
    if is_moe:
        layer.pre_mlp_layernorm = final_norm
        parts = dataclasses.replace(layer.mlp.keywords["submodules"], router=Router)
        layer.mlp = functools.partial(GroupedMixture, submodules=parts)
        layer.sharded_state_dict_keys_map = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}  # as of dense layers
    if args.layernorm_position == "post":
        attention.linear_qkv = TEColumnParallelLinear
        if is_moe:
            layer.pre_mlp_layernorm = IdentityOp
        else:
            layer.mlp.keywords["submodules"].linear_fc1 = TEColumnParallelLinear
    return spec
