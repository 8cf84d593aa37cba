"""Which rows of Megatron's layers the projections of PEFT's names are.

`linear_qkv` keeps, for each key and value group, R·D rows of q, D of k and D of v; `linear_fc1` all gate rows, then all
up rows. A rank's rows have the same order. Projections of multi-latent attention are layers of their own.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.lora import LoRASettings
from megarl.mcore.config.model_flags import is_gated
from megarl.mcore.model.pipeline_layout import moe_layer_pattern
from megarl.mcore.weights.hf.mapping import HeadLayout

LINEARS = {
    "self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "self_attention.linear_proj": ("o_proj",),
    "self_attention.linear_q_proj": ("q_proj",),
    "self_attention.linear_q_down_proj": ("q_a_proj",),
    "self_attention.linear_q_up_proj": ("q_b_proj",),
    "self_attention.linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "self_attention.linear_kv_up_proj": ("kv_b_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
ROW_PARALLEL = ("o_proj", "down_proj")  # their inputs are split over tensor-parallel ranks, not their outputs


class Projection(NamedTuple):
    """One of PEFT's modules inside a linear layer of this rank."""

    name: str
    rows: slice | Tensor  # of the layer's output on this rank


def projections_of(linear: str, layer, args, targets: tuple[str, ...]) -> list[Projection]:
    """The targeted projections of a layer; [] if it has none.

    Args:
        linear: the layer's name in the model.
        layer: Megatron's column- or row-parallel linear layer.
        args: the role's Megatron namespace.
    """
    names = next((names for suffix, names in LINEARS.items() if linear.endswith(suffix)), ())
    count = len(layer.weight)
    if names == LINEARS["self_attention.linear_qkv"]:
        rows = _rows_of_heads(count, HeadLayout.of(args), layer.weight.device)
    elif len(names) == 2 and is_gated(args):
        rows = [slice(0, count // 2), slice(count // 2, count)]
    else:
        names, rows = names[-1:], [slice(0, count)]
    return [Projection(name, of_name) for name, of_name in zip(names, rows, strict=True) if name in targets]


def _rows_of_heads(count: int, heads: HeadLayout, device) -> list[Tensor]:
    """Rows of q, k and v among `count` rows."""
    grouped = torch.arange(count, device=device).view(-1, heads.queries + 2, heads.channels)
    return [grouped[:, part].flatten() for part in (slice(0, heads.queries), heads.queries, heads.queries + 1)]


def factor_shapes(args, lora: LoRASettings) -> dict[str, tuple[int, ...]]:
    """Global shapes of all factors of a model by their keys in a checkpoint, which stack the experts."""
    hidden, shapes = args.hidden_size, {}
    absent = "self_attention.linear_qkv" if args.multi_latent_attention else "self_attention.linear_q_proj"
    linears = {suffix: names for suffix, names in LINEARS.items() if suffix != absent}  # both have a q_proj
    sizes = _latent_attention_sizes(args) if args.multi_latent_attention else _attention_sizes(args)

    def add(prefix: str, stacked: tuple[int, ...], sizes: dict[str, tuple[int, int]]):
        for suffix, names in linears.items():
            for name in (name for name in names if name in sizes and name in lora.targets):
                rows, columns = sizes[name]
                key = f"lora.{prefix}.{suffix}.{name}.lora_"
                shapes[f"{key}A"], shapes[f"{key}B"] = (*stacked, lora.rank, columns), (*stacked, rows, lora.rank)

    def mlp(ffn: int) -> dict[str, tuple[int, int]]:
        return {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}

    for number, is_moe in enumerate(moe_layer_pattern(args)):
        layer = f"decoder.layers.{number}"
        add(layer, (), sizes)
        if not is_moe:
            add(f"{layer}.mlp", (), mlp(args.ffn_hidden_size))
            continue
        add(f"{layer}.mlp.experts.local_experts", (args.num_experts,), mlp(args.moe_ffn_hidden_size))
        if args.moe_shared_expert_intermediate_size:
            add(f"{layer}.mlp.shared_experts", (), mlp(args.moe_shared_expert_intermediate_size))
    return shapes


def _attention_sizes(args) -> dict[str, tuple[int, int]]:
    """Rows and columns of the projections."""
    hidden, heads = args.hidden_size, HeadLayout.of(args)
    attended = heads.groups * heads.queries * heads.channels
    sizes = {"q_proj": (attended, hidden), "o_proj": (hidden, attended)}
    return sizes | dict.fromkeys(("k_proj", "v_proj"), (heads.groups * heads.channels, hidden))


def _latent_attention_sizes(args) -> dict[str, tuple[int, int]]:
    hidden, heads, latent, queries = args.hidden_size, args.num_attention_heads, args.kv_lora_rank, args.q_lora_rank
    width, attended = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim), heads * args.v_head_dim
    sizes = {
        "kv_a_proj_with_mqa": (latent + args.qk_pos_emb_head_dim, hidden),
        "kv_b_proj": (heads * args.qk_head_dim + attended, latent),
        "o_proj": (hidden, attended),
    }
    of_queries = {"q_a_proj": (queries, hidden), "q_b_proj": (width, queries)}
    return sizes | ({"q_proj": (width, hidden)} if queries is None else of_queries)
