"""Which rows of this rank's linear layers the targeted projections are, and the shapes of their factors."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from megarl.mcore.config.model_flags import is_gated
from megarl.mcore.lora.settings import LoRASettings
from megarl.mcore.model.pipeline_layout import moe_layer_pattern
from megarl.mcore.model.projections import LINEARS, HeadLayout, Sizes, attention_sizes, linears_of, mlp_sizes

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
        rows: list[Any] = _rows_of_heads(count, HeadLayout.of(args), layer.weight.device)
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
    hidden, linears = args.hidden_size, linears_of(args)
    shapes = {}

    def add(prefix: str, stacked: tuple[int, ...], sizes: Sizes):
        for suffix, names in linears.items():
            for name in (name for name in names if name in sizes and name in lora.targets):
                rows, columns = sizes[name]
                key = f"lora.{prefix}.{suffix}.{name}.lora_"
                shapes[f"{key}A"], shapes[f"{key}B"] = (*stacked, lora.rank, columns), (*stacked, rows, lora.rank)

    for number, is_moe in enumerate(moe_layer_pattern(args)):
        layer, shared = f"decoder.layers.{number}", args.moe_shared_expert_intermediate_size
        add(layer, (), attention_sizes(args))
        if not is_moe:
            add(f"{layer}.mlp", (), mlp_sizes(hidden, args.ffn_hidden_size))
            continue
        add(f"{layer}.mlp.experts.local_experts", (args.num_experts,), mlp_sizes(hidden, args.moe_ffn_hidden_size))
        if shared:
            add(f"{layer}.mlp.shared_experts", (), mlp_sizes(hidden, shared))
    return shapes
