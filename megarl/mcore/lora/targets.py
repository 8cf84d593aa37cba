"""Rank, scale and targets of a role's factors, their shapes, and which rows of a rank's linear layers targets are."""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore.config.model_flags import is_gated
from megarl.mcore.model.pipeline_layout import layer_kinds
from megarl.mcore.model.projections import (
    IN_PROJ,
    LINEARS,
    MAMBA_LINEARS,
    HeadLayout,
    Sizes,
    attention_sizes,
    expert_sizes,
    linears_of,
    mlp_sizes,
    recurrent_sizes,
)
from megarl.mcore.recurrence import layer_sizes

ALL_LINEAR = "all-linear"
ATTENTION_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")
LATENT_TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")  # of multi-latent attention
GATE_TARGETS = ("g_proj",)  # of multi-latent attention with gates
IN_PROJ_TARGETS = LINEARS[IN_PROJ]
GATE_LATENT_TARGETS = ("g_a_proj", "g_b_proj", "f_a_proj", "f_b_proj")  # of gates and decays from latents
# Of gated delta nets, of those with latents, of Mamba-2, of all.
RECURRENT_TARGETS = (*IN_PROJ_TARGETS, *GATE_LATENT_TARGETS, "in_proj", "out_proj")
TARGETS = ATTENTION_TARGETS + MLP_TARGETS + LATENT_TARGETS + GATE_TARGETS + RECURRENT_TARGETS


@dataclasses.dataclass(frozen=True)
class LoRASettings:
    """The factors of a role: W + s·B·A for every weight W that the targets name."""

    rank: int  # r: A is [r, K] and B [N, r] for W [N, K]
    alpha: float
    rslora: bool
    targets: tuple[str, ...]  # of TARGETS, in that order; of a model of transformers as PEFT's `target_modules`

    @property
    def scale(self) -> float:
        """s = α/r, or α/√r with rank stabilization (2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def with_rank(self, rank: int) -> "LoRASettings":
        """The same scale with another rank."""
        return dataclasses.replace(self, rank=rank, alpha=self.scale * (math.sqrt(rank) if self.rslora else rank))

    def values(self) -> dict[str, Any]:
        """The values as flags give them, by flag; what a checkpoint must agree on."""
        numbers: dict[str, Any] = {"--lora-rank": self.rank, "--lora-alpha": self.alpha, "--lora-rslora": self.rslora}
        return numbers | {"--lora-targets": ",".join(self.targets)}

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> "LoRASettings":
        """The inverse of `values`."""
        targets = tuple(values["--lora-targets"].split(","))
        return cls(values["--lora-rank"], values["--lora-alpha"], values["--lora-rslora"], targets)


def parse_targets(text: str) -> tuple[str, ...]:
    """`"q_proj,v_proj"` or `"all-linear"` -> targets in the order of `TARGETS`. ValueError for an unknown name."""
    names = set(TARGETS) if text == ALL_LINEAR else {name.strip() for name in text.split(",")}
    if unknown := sorted(names - set(TARGETS)):
        raise ValueError(f"{unknown[0]!r} is no target")
    return tuple(name for name in TARGETS if name in names)


ROW_PARALLEL = ("o_proj", "out_proj", "down_proj")  # tensor-parallel ranks share their inputs, not their outputs


class Projection(NamedTuple):
    """One of PEFT's modules inside a linear layer of this rank."""

    name: str
    rows: slice | Tensor  # of the layer's output on this rank
    whole: int | None = None  # rows of the whole B, if each rank has it: its own are no share of equal size, or several
    held: Tensor | None = None  # those of them that this rank uses

    @property
    def height(self) -> int:
        """Rows of B on this rank."""
        here = self.rows.stop - self.rows.start if isinstance(self.rows, slice) else len(self.rows)
        return here if self.whole is None else self.whole


def projections_of(linear: str, layer, args, targets: tuple[str, ...]) -> list[Projection]:
    """The targeted projections of a layer; [] if it has none.

    Args:
        linear: the layer's name in the model.
        layer: Megatron's column- or row-parallel linear layer.
        args: the role's Megatron namespace.
    """
    suffix, names = next((each for each in linears_of(args).items() if linear.endswith(each[0])), ("", ()))
    count, device = len(layer.weight), layer.weight.device
    rank, ranks = dist.get_rank(layer.tp_group), dist.get_world_size(layer.tp_group)
    if suffix == "self_attention.linear_qkv":
        found = _projections_of_heads(HeadLayout.of(args), torch.arange(count, device=device), rank, ranks)
    elif suffix == IN_PROJ and names != MAMBA_LINEARS[IN_PROJ]:
        starts = [0, *itertools.accumulate(layer_sizes(args, ranks).parts.values())]
        found = [Projection(name, slice(a, b)) for name, a, b in zip(names, starts, starts[1:], strict=False)]
    elif suffix == IN_PROJ and ranks > 1:
        # Its share of each part of the whole projection, one after another.
        sizes = [*layer_sizes(args, ranks).parts.values()]
        starts = [0, *itertools.accumulate(size * ranks for size in sizes)]
        of_parts = zip(starts[:-1], sizes, strict=True)
        held = torch.cat([torch.arange(size) + start + rank * size for start, size in of_parts])
        found = [Projection(names[0], slice(0, count), count * ranks, held.to(device))]
    elif len(names) == 2 and (is_gated(args) or suffix != "linear_fc1"):
        found = [Projection(names[0], slice(0, count // 2)), Projection(names[1], slice(count // 2, count))]
    else:
        found = [Projection(name, slice(0, count)) for name in names[-1:]]
    return [projection for projection in found if projection.name in targets]


def _projections_of_heads(heads: HeadLayout, rows: Tensor, rank: int, ranks: int) -> list[Projection]:
    """q, k and v among the `rows` 0, 1, … of a rank. If ranks share a group, a rank may have none of one of them, and
    each has the whole B, since checkpoints split tensors equally."""
    is_shared, found, first = heads.ranks_of_group(ranks) > 1, [], 0
    of_group = sum(heads.heights) * heads.channels
    group, row = (len(rows) * rank + rows) // of_group, (len(rows) * rank + rows) % of_group  # group of the whole model
    for name, height in zip(LINEARS["self_attention.linear_qkv"], heads.heights, strict=True):
        each = height * heads.channels
        here = ((row >= first) & (row < first + each)).nonzero().flatten()
        whole = (heads.groups * each, (group * each + row - first)[here]) if is_shared else ()
        found.append(Projection(name, here, *whole))
        first += each
    return found


def factor_shapes(args, lora: LoRASettings) -> dict[str, tuple[int, ...]]:
    """Global shapes of all factors of a model by their keys in a checkpoint, which stack the experts."""
    if args.model_folder is not None:
        return args.model_folder.factor_shapes(lora)
    linears, shapes = linears_of(args), {}

    def add(prefix: str, stacked: tuple[int, ...], sizes: Sizes):
        for suffix, names in linears.items():
            for name in (name for name in names if name in sizes and name in lora.targets):
                rows, columns = sizes[name]
                key = f"lora.{prefix}.{suffix}.{name}.lora_"
                shapes[f"{key}A"], shapes[f"{key}B"] = (*stacked, lora.rank, columns), (*stacked, rows, lora.rank)

    for number, kind in enumerate(layer_kinds(args)):
        layer, shared = f"decoder.layers.{number}", args.moe_shared_expert_intermediate_size
        if kind.has_mixer:
            add(layer, (), recurrent_sizes(args) if kind.is_recurrent else attention_sizes(args))
        if kind.has_mlp and not kind.is_moe:
            add(f"{layer}.mlp", (), mlp_sizes(args, args.ffn_hidden_size))
        if kind.is_moe:
            add(f"{layer}.mlp.experts.local_experts", (args.num_experts,), expert_sizes(args))
        if kind.is_moe and shared:
            add(f"{layer}.mlp.shared_experts", (), mlp_sizes(args, shared))
    return shapes
