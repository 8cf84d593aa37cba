"""The weights of a whole model by its flags alone: names and shapes as in a checkpoint, before any model exists."""

from collections.abc import Iterator
from typing import NamedTuple

from megarl.mcore.model.pipeline_layout import LayerKind, prediction_kind
from megarl.mcore.model.projections import (
    HeadLayout,
    Sizes,
    attention_sizes,
    expert_sizes,
    latent_projections,
    linear_sizes,
    mlp_sizes,
)
from megarl.mcore.recurrence.rule import layer_sizes
from megarl.mcore.recurrence.state_space import CONVOLVED, SpaceSizes
from megarl.mcore.weights.hf.family import EMBEDDING, HEAD, PREDICTED, PREDICTED_LAYER


class ModelWeight(NamedTuple):
    """One tensor of one layer or expert."""

    key: str  # `decoder.layers.N.…`, also where a checkpoint stacks the layers
    expert: int | None
    shape: tuple[int, ...]


def model_weights(args, vocab_size: int, kinds: list[LayerKind], value_head: bool = False) -> Iterator[ModelWeight]:
    """Yields the weights of a language model, or of one with a scalar head.

    Args:
        args: the role's Megatron namespace.
        vocab_size: without padding.
        kinds: of the layers.
    """
    yield ModelWeight(EMBEDDING, None, (vocab_size, args.hidden_size))
    for layer, kind in enumerate(kinds):
        yield from _layer(args, f"decoder.layers.{layer}.", kind)
    yield ModelWeight("decoder.final_layernorm.weight", None, (args.hidden_size,))
    if value_head or args.untie_embeddings_and_output_weights:
        yield ModelWeight(HEAD, None, (1 if value_head else vocab_size, args.hidden_size))


def prediction_weights(args) -> Iterator[ModelWeight]:
    """Yields the weights of the layer of multi-token prediction, without the embedding and head that it shares."""
    hidden = args.hidden_size
    yield from _layer(args, PREDICTED_LAYER, prediction_kind(args))
    for name in ("enorm", "hnorm", "final_layernorm"):
        yield ModelWeight(f"{PREDICTED}{name}.weight", None, (hidden,))
    yield ModelWeight(f"{PREDICTED}eh_proj.weight", None, (hidden, 2 * hidden))


def _layer(args, prefix: str, kind: LayerKind) -> Iterator[ModelWeight]:
    shapes = _norms(args, kind)
    if kind.has_mixer:
        shapes |= _recurrent(args) if kind.is_recurrent else _attention(args)
    if kind.is_moe:
        shapes |= _experts(args)
    elif kind.has_mlp:
        shapes |= _projections(args, "mlp", mlp_sizes(args, args.ffn_hidden_size), args.add_bias_linear)
    for name, shape in shapes.items():
        for expert in range(args.num_experts) if name.startswith("mlp.experts.") else (None,):
            yield ModelWeight(prefix + name, expert, shape)


def _norms(args, kind: LayerKind) -> dict[str, tuple[int, ...]]:
    """Norms before and after attention and MLP."""
    names, first = [], "in_proj" if kind.is_recurrent else "linear_qkv"
    attention = f"self_attention.{first}.layer_norm_weight"
    if args.layernorm_position != "post":
        names = ["input_layernorm.weight" if args.multi_latent_attention else attention]
        names.append("mlp.linear_fc1.layer_norm_weight")
        names = [name for name, has in zip(names, (kind.has_mixer, kind.has_mlp), strict=True) if has]
    if args.layernorm_position != "pre":
        names += ["post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"]
    return dict.fromkeys(names, (args.hidden_size,))


def _attention(args) -> dict[str, tuple[int, ...]]:
    linears = linear_sizes(args, attention_sizes(args))
    shapes: dict[str, tuple[int, ...]] = {f"{linear}.weight": size for linear, size in linears.items()}
    qkv = linears.get("self_attention.linear_qkv")
    if qkv and (args.add_bias_linear or args.add_qkv_bias):
        shapes["self_attention.linear_qkv.bias"] = qkv[:1]
    if args.add_bias_linear:
        shapes["self_attention.linear_proj.bias"] = (args.hidden_size,)
    if args.softmax_type == "learnable":
        shapes["self_attention.core_attention.softmax_offset"] = (args.num_attention_heads,)
    return shapes | _query_and_key_norms(args)


def _recurrent(args) -> dict[str, tuple[int, ...]]:
    """The weights of a gated delta net or of Mamba-2."""
    sizes, hidden, taps = layer_sizes(args, 1), args.hidden_size, args.linear_conv_kernel_dim
    shapes: dict[str, tuple[int, ...]] = {f"in_proj.weight.{name}": (n, hidden) for name, n in sizes.parts.items()}
    convolved = CONVOLVED if isinstance(sizes, SpaceSizes) else ("query", "key", "value")
    shapes |= {f"conv1d.weight.{name}": (sizes.parts[name], 1, taps) for name in convolved}
    shapes |= {"A_log": (sizes.heads,), "dt_bias": (sizes.heads,)}
    if isinstance(sizes, SpaceSizes):
        shapes |= {f"conv1d.bias.{name}": (sizes.parts[name],) for name in convolved}
        shapes |= {"D": (sizes.heads,), "norm.weight": (sizes.parts["x"],)}
    else:
        shapes["out_norm.weight"] = (sizes.values,)
    shapes["out_proj.weight"] = (hidden, sizes.heads * sizes.values)
    return {f"self_attention.{name}": shape for name, shape in shapes.items()}


def _query_and_key_norms(args) -> dict[str, tuple[int, ...]]:
    """Norms of each head, of all heads together, or of latents."""
    heads, norms = HeadLayout.of(args), {}
    if args.qk_layernorm and args.multi_latent_attention:
        norms = {"q_layernorm": args.q_lora_rank, "kv_layernorm": args.kv_lora_rank}
    elif args.qk_layernorm:
        norms = {"q_layernorm": heads.channels, "k_layernorm": heads.channels}
    elif args.qk_layernorm_all_heads:
        each = heads.groups * heads.channels
        norms = {"q_norm": each * heads.queries, "k_norm": each}
    return {f"self_attention.{name}.weight": (size,) for name, size in norms.items() if size is not None}


def _experts(args) -> dict[str, tuple[int, ...]]:
    hidden, experts = args.hidden_size, args.num_experts
    shapes: dict[str, tuple[int, ...]] = {"mlp.router.weight": (experts, hidden)}
    if args.add_bias_linear:
        shapes["mlp.router.bias"] = (experts,)
    if args.moe_router_enable_expert_bias:
        shapes["mlp.router.expert_bias"] = (experts,)
    shapes |= {f"mlp.{name}.weight": size for name, size in latent_projections(args).items()}
    shapes |= _projections(args, "mlp.experts.experts", expert_sizes(args), args.add_bias_linear)
    if args.moe_shared_expert_intermediate_size:
        sizes = mlp_sizes(args, args.moe_shared_expert_intermediate_size)
        shapes |= _projections(args, "mlp.shared_experts", sizes, False)
    if args.moe_shared_expert_gate:
        shapes["mlp.shared_experts.gate_weight"] = (1, hidden)
    return shapes


def _projections(args, module: str, sizes: Sizes, has_bias: bool) -> dict[str, tuple[int, ...]]:
    linears = linear_sizes(args, sizes)
    shapes = {f"{module}.{linear}.weight": size for linear, size in linears.items()}
    return shapes | ({f"{module}.{linear}.bias": size[:1] for linear, size in linears.items()} if has_bias else {})
