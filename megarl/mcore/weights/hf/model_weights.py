"""The weights of a whole model by its flags alone: names and shapes as in a checkpoint, before any model exists."""

from collections.abc import Iterator
from typing import NamedTuple

from megarl.mcore.weights.hf.family import EMBEDDING, HEAD
from megarl.mcore.weights.hf.mapping import HeadLayout


class ModelWeight(NamedTuple):
    """One tensor of one layer or expert."""

    key: str  # `decoder.layers.N.…`, also where a checkpoint stacks the layers
    expert: int | None
    shape: tuple[int, ...]


def model_weights(args, vocab_size: int, has_experts: list[bool], value_head: bool = False) -> Iterator[ModelWeight]:
    """Yields the weights of a language model, or of one with a scalar head.

    Args:
        args: the role's Megatron namespace.
        vocab_size: without padding.
        has_experts: of each layer.
    """
    yield ModelWeight(EMBEDDING, None, (vocab_size, args.hidden_size))
    for layer, is_moe in enumerate(has_experts):
        prefix = f"decoder.layers.{layer}."
        shapes = _norms(args) | _attention(args) | (_experts(args) if is_moe else _mlp(args))
        for name, shape in shapes.items():
            for expert in range(args.num_experts) if name.startswith("mlp.experts.") else (None,):
                yield ModelWeight(prefix + name, expert, shape)
    yield ModelWeight("decoder.final_layernorm.weight", None, (args.hidden_size,))
    if value_head or args.untie_embeddings_and_output_weights:
        yield ModelWeight(HEAD, None, (1 if value_head else vocab_size, args.hidden_size))


def _norms(args) -> dict[str, tuple[int, ...]]:
    """Norms before and after attention and MLP."""
    names, attention = [], "self_attention.linear_qkv.layer_norm_weight"
    if args.layernorm_position != "post":
        names = ["input_layernorm.weight" if args.multi_latent_attention else attention]
        names.append("mlp.linear_fc1.layer_norm_weight")
    if args.layernorm_position != "pre":
        names += ["post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"]
    return dict.fromkeys(names, (args.hidden_size,))


def _attention(args) -> dict[str, tuple[int, ...]]:
    if args.multi_latent_attention:
        return _latent_attention(args)
    heads, hidden = HeadLayout.of(args), args.hidden_size
    width, attended = heads.groups * (heads.queries + 2) * heads.channels, heads.groups * heads.queries * heads.channels
    shapes = {
        "self_attention.linear_qkv.weight": (width, hidden),
        "self_attention.linear_proj.weight": (hidden, attended),
    }
    if args.add_bias_linear or args.add_qkv_bias:
        shapes["self_attention.linear_qkv.bias"] = (width,)
    if args.add_bias_linear:
        shapes["self_attention.linear_proj.bias"] = (hidden,)
    if args.softmax_type == "learnable":
        shapes["self_attention.core_attention.softmax_offset"] = (args.num_attention_heads,)
    if args.qk_layernorm:
        shapes |= {f"self_attention.{x}_layernorm.weight": (heads.channels,) for x in "qk"}
    if args.qk_layernorm_all_heads:
        shapes["self_attention.q_norm.weight"] = (attended,)
        shapes["self_attention.k_norm.weight"] = (heads.groups * heads.channels,)
    return shapes


def _latent_attention(args) -> dict[str, tuple[int, ...]]:
    """Queries from the hidden states or a latent of them, keys and values from a latent that all heads share."""
    hidden, heads, latent, queries = args.hidden_size, args.num_attention_heads, args.kv_lora_rank, args.q_lora_rank
    width, attended = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim), heads * args.v_head_dim
    shapes = {
        "linear_kv_down_proj.weight": (latent + args.qk_pos_emb_head_dim, hidden),
        "linear_kv_up_proj.weight": (heads * args.qk_head_dim + attended, latent),
        "linear_proj.weight": (hidden, attended),
    }
    shapes |= {"linear_q_proj.weight": (width, hidden)} if queries is None else {
        "linear_q_down_proj.weight": (queries, hidden), "linear_q_up_proj.weight": (width, queries)
    }  # fmt: skip
    if args.add_bias_linear:
        shapes["linear_proj.bias"] = (hidden,)
    if args.qk_layernorm:
        norms = {"q": queries, "kv": latent}
        shapes |= {f"{name}_layernorm.weight": (size,) for name, size in norms.items() if size is not None}
    return {f"self_attention.{name}": shape for name, shape in shapes.items()}


def _mlp(args) -> dict[str, tuple[int, ...]]:
    return _projections("mlp", args.hidden_size, args.ffn_hidden_size, args.add_bias_linear)


def _experts(args) -> dict[str, tuple[int, ...]]:
    hidden, experts = args.hidden_size, args.num_experts
    shapes = {"mlp.router.weight": (experts, hidden)}
    if args.add_bias_linear:
        shapes["mlp.router.bias"] = (experts,)
    if args.moe_router_enable_expert_bias:
        shapes["mlp.router.expert_bias"] = (experts,)
    ffn = args.moe_ffn_hidden_size or args.ffn_hidden_size
    shapes |= _projections("mlp.experts.experts", hidden, ffn, args.add_bias_linear)
    if args.moe_shared_expert_intermediate_size:
        shapes |= _projections("mlp.shared_experts", hidden, args.moe_shared_expert_intermediate_size, False)
    if args.moe_shared_expert_gate:
        shapes["mlp.shared_experts.gate_weight"] = (1, hidden)
    return shapes


def _projections(module: str, hidden: int, ffn: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    shapes = {f"{module}.linear_fc1.weight": (2 * ffn, hidden), f"{module}.linear_fc2.weight": (hidden, ffn)}
    if has_bias:
        shapes |= {f"{module}.linear_fc1.bias": (2 * ffn,), f"{module}.linear_fc2.bias": (hidden,)}
    return shapes
