"""The layers of an engine's step; decode steps of plain dense layers are one compiled operator, on a CPU in fp32.

Plain layers have RMSNorms before attention and MLP, grouped-query attention without a window, SwiGLU and no biases but
those of queries, keys and values. The operator calls the kernels that the layers of a training forward call, so the
bits are the same.
"""

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor

from megarl.mcore.attention.backends import PackedAttention
from megarl.mcore.attention.cache_attention import softmax_scale
from megarl.mcore.attention.native_attention import NativeDecodes
from megarl.mcore.attention.segments import window_of
from megarl.mcore.kernels import native
from megarl.mcore.kernels.linear import prepacked
from megarl.mcore.kernels.norm import RMSNorm
from megarl.mcore.kernels.swiglu import SwiGLUMLP
from megarl.mcore.model.decoder_layer import DecoderLayer, PagedSelfAttention, StepPlan


def run_decode_layers(block: TransformerBlock, hidden: Tensor | None, context, frequencies: Tensor | None) -> Tensor:
    """Returns [T, 1, H]: hidden states after a chunk's layers and, in the last chunk, the final norm.

    Args:
        hidden: the step's embedded tokens; None on later stages, which read what the previous stage sent.
        context: the engine's `megarl.mcore.inference.paged_context.PagedContext`.
        frequencies: rotary frequencies of all positions, None without rotary embeddings.
    """
    hidden = hidden if block.pre_process else block.input_tensor
    plan = context.plan(frequencies)
    dedup = plan.dedup
    hidden = hidden if dedup is None else hidden.index_select(0, dedup.kept_tokens)
    if _supports(block, plan):
        hidden = _run(block, hidden, plan)
    else:
        for layer in block.layers:
            hidden, _ = layer(hidden_states=hidden, inference_context=context, rotary_pos_emb=frequencies)
    hidden = hidden if block.final_layernorm is None else block.final_layernorm(hidden)
    return hidden if dedup is None else hidden.index_select(0, dedup.inverse)


def _supports(block: TransformerBlock, plan: StepPlan) -> bool:
    reads = plan.reads[0]
    only_decodes = reads.only_decodes and isinstance(reads.decodes[0], NativeDecodes)
    # The last chunk of a prompt that is read in several may be one row of an image, which looks like a decode.
    return only_decodes and plan.dedup is None and plan.images is None and bool(_weights(block))


def _run(block: TransformerBlock, hidden: Tensor, plan: StepPlan) -> Tensor:
    config, reads = block.config, plan.reads[0].decodes[0]
    out = hidden.squeeze(1).clone(memory_format=torch.contiguous_format)
    empty = out.new_empty(0)
    cosines, sines = (empty, empty) if plan.rotations is None else plan.rotations[0]
    core = block.layers[0].self_attention.core_attention
    scale = softmax_scale(config.kv_channels, core.softmax_scale)
    caches = plan.caches[: len(block.layers)]  # a layer of multi-token prediction has the last one
    native.ops.decode_layers(
        out, _weights(block), caches, cosines, sines, plan.slot_mapping, reads.pages, reads.keys, reads.starts,
        config.num_attention_heads, config.ffn_hidden_size, config.layernorm_epsilon, scale,
    )  # fmt: skip
    return out.unsqueeze(1)


def _weights(block: TransformerBlock) -> list[Tensor]:
    """The weights of all layers in the order of the operator's `Layer`; empty unless all layers are plain and their
    weights are prepacked."""
    if not native.is_used() or not len(block.layers) or not hasattr(block.layers[0].self_attention, "linear_qkv"):
        return []
    packed = prepacked(block.layers[0].self_attention.linear_qkv.weight)
    made_for, weights = getattr(block, "_native_weights", (None, []))
    if packed is None or made_for is packed:
        return [] if packed is None else weights
    is_plain = all(map(_is_plain, block.layers)) and not block.config.no_rope_freq and window_of(block.config) is None
    weights = [weight for layer in block.layers for weight in _weights_of(layer)] if is_plain else []
    block._native_weights = packed, weights
    return weights


def _is_plain(layer) -> bool:
    attention, mlp = layer.self_attention, layer.mlp
    if type(layer) is not DecoderLayer or type(attention) is not PagedSelfAttention or type(mlp) is not SwiGLUMLP:
        return False
    if layer.config.attention_output_gate:
        return False
    norms = [layer.input_layernorm, layer.pre_mlp_layernorm]
    norms += [norm for norm in (attention.q_layernorm, attention.k_layernorm) if not _is_absent(norm)]
    linears = [attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2]
    has_biases = any(linear.bias is not None for linear in linears[1:])
    has_parts = all(map(_is_whole, linears)) and not has_biases and mlp.is_plain_swiglu
    has_norms = all(type(norm) is RMSNorm for norm in norms) and len(norms) in (2, 4)
    is_plain_attention = type(attention.core_attention) is PackedAttention
    return has_norms and has_parts and is_plain_attention and layer.config.mlp_chunks_for_prefill == 1


def _is_absent(norm) -> bool:
    return norm is None or isinstance(norm, IdentityOp)


def _is_whole(linear) -> bool:
    """Whether the layer's prepacked weight is all that it multiplies by."""
    is_alone = linear.tp_group.size() == 1 and not vars(linear).get("adds_product", False)
    return is_alone and prepacked(linear.weight) is not None


def _weights_of(layer) -> list[Tensor]:
    attention, mlp = layer.self_attention, layer.mlp
    norms = (attention.q_layernorm, attention.k_layernorm)
    query_norm, key_norm = (torch.empty(0) if _is_absent(norm) else norm.weight.data for norm in norms)
    bias = attention.linear_qkv.bias
    return [
        layer.input_layernorm.weight.data,
        prepacked(attention.linear_qkv.weight),
        torch.empty(0) if bias is None else bias.data,
        query_norm,
        key_norm,
        prepacked(attention.linear_proj.weight),
        layer.pre_mlp_layernorm.weight.data,
        prepacked(mlp.linear_fc1.weight),
        prepacked(mlp.linear_fc2.weight),
    ]
