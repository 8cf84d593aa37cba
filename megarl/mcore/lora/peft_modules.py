"""PEFT's modules of a model, and the factors of megarl that each consists of.

A module that fuses projections has one A for all of them. Factors of separate projections fit into it with the sum of
their ranks: A stacks theirs, and B has a block for each. `mlp.experts` is one module with factors of all experts.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.mcore.config.model_flags import is_gated
from megarl.mcore.config.optimizer_flags import MODULE
from megarl.mcore.lora.targets import IN_PROJ_TARGETS, TARGETS, LoRASettings, factor_shapes
from megarl.mcore.model.projections import MAMBA_LINEARS, HeadLayout, linears_of, projections_by_part
from megarl.mcore.weights.hf.family import Family
from megarl.mcore.weights.hf.mapping import Heads, Mapping, RecurrentPart, Rows, StackedExperts

KEY = re.compile(r"lora\.decoder\.layers\.(\d+)\.(.+)\.(\w+)\.lora_A")


class Member(NamedTuple):
    """A projection inside a module."""

    key: str  # of its factors in a checkpoint, without `.lora_A`
    outputs: slice | Tensor  # its rows of the module's output
    rows: int
    singles: tuple[str, ...]  # names that the module of a single `{expert}` may have instead


class PeftModule(NamedTuple):
    """A module, or a parameter of several experts, that PEFT adapts."""

    name: str  # without `base_model.model.`; of experts with the parameter's name at the end
    members: tuple[Member, ...]
    columns: int  # of its input
    experts: int | None  # number of experts of a parameter that stacks them

    @property
    def rows(self) -> int:
        return sum(member.rows for member in self.members)

    def names(self) -> Iterator[str]:
        """The module's name, and those that modules of single experts may have instead."""
        yield self.name
        for single in (single for member in self.members for single in member.singles):
            yield from (single.format(expert=expert) for expert in range(self.experts or 0))


def known_modules(args, family: Family, prefix: str) -> list[PeftModule]:
    """The modules under all of their names: those of transformers, and those of a published folder's own code."""
    tables = (family.modules or family.layers, family.layers)
    found: dict[str, PeftModule] = {}
    for module in (module for table in tables for module in peft_modules(args, family, prefix, table)):
        found.setdefault(module.name, module)
    return [*found.values()]


def peft_modules(args, family: Family, prefix: str, table: dict[str, Mapping] | None = None) -> list[PeftModule]:
    """All modules of a model that may have factors, with their members.

    Args:
        args: the role's Megatron namespace.
        family: names the modules.
        prefix: of the names of all layers.
        table: of the family, with other names than transformers has.
    """
    if args.model_folder is not None:
        return [
            PeftModule(name, (Member(f"lora.{MODULE}{name}", slice(0, rows), rows, ()),), columns, None)
            for name, (rows, columns) in args.model_folder.linears().items()
        ]
    shapes, modules = factor_shapes(args, LoRASettings(rank=1, alpha=1.0, rslora=False, targets=TARGETS)), {}
    heads, linears, layers = HeadLayout.of(args), linears_of(args), table or family.modules or family.layers
    expert_parameters = {"linear_fc1": "gate_up_proj" if is_gated(args) else "up_proj", "linear_fc2": "down_proj"}
    for key in (key for key in shapes if key.endswith(".lora_A")):
        layer, linear, projection = KEY.fullmatch(key).groups()
        rows = shapes[key[:-1] + "B"][-2]
        projections = next(names for suffix, names in linears.items() if linear.endswith(suffix))
        parts = _parts(projection, projections, heads, rows)
        weight = linear.replace("local_experts", "experts") + ".weight"
        mappings = {layers[f"{weight}.{part}" if part else weight]: size for part, size in parts.items()}
        mapping, is_expert, singles = next(iter(mappings)), "local_experts" in linear, ()
        if is_expert:
            named = _single_experts(family, weight, projection)
            singles = tuple(f"{prefix}layers.{layer}.{single}" for single in named)
            name = f"{family.experts}.{expert_parameters[linear.rpartition('.')[2]]}"
        else:
            number = projections.index(projection) if len(mapping.names) > 1 else 0
            name = mapping.names[number].removesuffix(".weight")
        members = modules.setdefault((f"{prefix}layers.{layer}.{name}", shapes[key][-1], is_expert), [])
        outputs = _outputs(mappings, name, heads, members)
        members.append(Member(key.removesuffix(".lora_A"), outputs, rows, singles))
    experts = args.num_experts
    return [
        PeftModule(name=name, members=tuple(found), columns=columns, experts=experts if stacks else None)
        for (name, columns, stacks), found in modules.items()
    ]


def _single_experts(family: Family, weight: str, projection: str) -> list[str]:
    """Names of an expert's projection: of most families, and as the folder has them (Mixtral's `w1`, `w3`, `w2`)."""
    found, mapping = [f"{family.experts}.{{expert}}.{projection}"], family.layers[weight]
    if isinstance(mapping, Rows):
        number = -1 if projection == "up_proj" else 0  # gate, then up
        found.append(mapping.names[number].removesuffix(".weight"))
    return found


def _parts(projection: str, projections: tuple[str, ...], heads: HeadLayout, rows: int) -> dict[str, int]:
    """Rows of a projection's parts that have keys of their own in checkpoints, by name; "": it has none."""
    if projections in MAMBA_LINEARS.values():
        return heads.recurrent.parts
    if projection not in IN_PROJ_TARGETS:
        return {"": rows}
    return {part: rows for part, name in projections_by_part(heads.recurrent).items() if name == projection}


def _outputs(mappings: dict[Mapping, int], name: str, heads: HeadLayout, before: list[Member]) -> slice | Tensor:
    """The rows of a module's output that are those of B.

    Args:
        mappings: of the parts of B, with their rows.
        before: members of the module in front of this one.
    """
    mapping, rows = next(iter(mappings.items()))
    if isinstance(mapping, RecurrentPart) or isinstance(mapping, Heads) and not mapping.are_in_order:
        ranges = [each for part, size in mappings.items() for each in part.ranges(size, heads, None)]
        ranges = [each for each in ranges if each.name == f"{name}.weight"]
        return torch.cat([each.source_row + each.step * torch.arange(each.rows) for each in ranges])
    first, step = sum(member.rows for member in before), 1
    if isinstance(mapping, StackedExperts) and mapping.projections > 1:  # their rows take turns
        first, step = len(before), mapping.projections
    return slice(first, first + (rows - 1) * step + 1, step)


def fuse(module: PeftModule, factors: dict[str, Tensor], rank: int) -> tuple[Tensor, Tensor] | None:
    """A and B of a module, [R, K] and [N, R], experts in front; None if none of its members has factors.

    Args:
        factors: whole factors by key in a checkpoint.
        rank: of each.
    """
    present = [member for member in module.members if f"{member.key}.lora_A" in factors]
    if not present:
        return None
    a = torch.cat([factors[f"{member.key}.lora_A"] for member in present], dim=-2)
    b = a.new_zeros(*a.shape[:-2], module.rows, rank * len(present))
    for i, member in enumerate(present):
        columns = slice(i * rank, (i + 1) * rank)
        b[..., member.outputs, columns] = factors[f"{member.key}.lora_B"]
    return a, b


def unfuse(module: PeftModule, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Factors of a module's members by key; the inverse of `fuse`.

    A member whose rows of B use only its own part of the ranks gets that part; otherwise all members get the whole A.
    """
    parts = [(member, b[..., member.outputs, :]) for member in module.members]
    if b.any():  # members without factors have zeros
        parts = [(member, part) for member, part in parts if part.any()]
    each, found = a.shape[-2] // len(parts), {}
    used = [slice(i * each, (i + 1) * each) for i in range(len(parts))]
    is_block = each * len(parts) == a.shape[-2] and all(
        part.count_nonzero() == part[..., columns].count_nonzero()
        for (_, part), columns in zip(parts, used, strict=True)
    )
    for (member, part), columns in zip(parts, used, strict=True):
        columns = columns if is_block else slice(None)
        found[f"{member.key}.lora_A"], found[f"{member.key}.lora_B"] = a[..., columns, :], part[..., columns]
    return found
