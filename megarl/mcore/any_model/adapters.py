"""Low-rank factors of a transformers module's linear layers, named and chosen as PEFT does.

A layer's factors are those of `lora.adapted_linear`; only what the layer computes with them is installed in another
way. Experts that are one parameter have none.
"""

from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor

from megarl.errors import UsageError
from megarl.mcore.any_model.chunk import PREFIX
from megarl.mcore.kernels.linear import at_least_rows
from megarl.mcore.lora.adapted_linear import AdaptedLinear
from megarl.mcore.lora.targets import ALL_LINEAR, LoRASettings, Projection

# Projections of a dense MLP and of shared experts that PEFT 0.21 takes for those of experts, in models with experts.
RENAMED = (".gate_proj", ".up_proj", ".down_proj", ".gate", ".w1", ".w2", ".w3")


class ModuleLinears(NamedTuple):
    """The linear layers of the module of a folder that can have factors."""

    path: str
    sizes: dict[str, tuple[int, int]]  # (rows, columns) by name
    has_experts: bool  # as parameters

    def renamed_by_peft(self) -> tuple[str, ...]:
        """Ends of names of layers that PEFT must be given as parameters."""
        return RENAMED if self.has_experts else ()

    def parse_targets(self, text: str) -> tuple[str, ...]:
        """`--lora-targets`, in the order of the text. UsageError for a name that no layer has."""
        names = self.sizes
        if not names:
            raise UsageError(f"--lora-targets {text}: the module of {self.path} has no linear layers")
        if text == ALL_LINEAR:
            return self.targets_naming(names)
        targets = tuple(dict.fromkeys(target.strip() for target in text.split(",")))
        for target in targets:
            if not any(_is_named(name, (target,)) for name in names):
                allowed = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
                raise UsageError(
                    f"--lora-targets {text}: no linear layer of {self.path} is {target}; allowed are {ALL_LINEAR}, "
                    f"and with commas {allowed}"
                )
        return targets

    def targets_naming(self, names: Collection[str]) -> tuple[str, ...]:
        """The shortest targets that name exactly these layers: the last part of a name, or all of it."""
        others, found = [name for name in self.sizes if name not in names], {}
        for name in names:
            last = name.rpartition(".")[2]
            found[name if any(_is_named(other, (last,)) for other in others) else last] = None
        return tuple(found)

    def adapts(self, weight: str, targets: Collection[str]) -> bool:
        """Whether the layer of a weight of a chunk has factors."""
        name = weight.removeprefix(PREFIX).removesuffix(".weight")
        return name in self.sizes and _is_named(name, targets)

    def key_of(self, name: str) -> str:
        """The key of a layer's factors in checkpoints, without `.lora_A`."""
        return f"lora.{PREFIX}{name}"

    def factor_shapes(self, lora: LoRASettings) -> dict[str, tuple[int, ...]]:
        """As of `lora.targets`."""
        named = {name: size for name, size in self.sizes.items() if _is_named(name, lora.targets)}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (rows, columns) in named.items():
            shapes |= {f"{self.key_of(name)}.lora_A": (lora.rank, columns)}
            shapes |= {f"{self.key_of(name)}.lora_B": (rows, lora.rank)}
        return shapes

    def adapted(self, chunk, lora: LoRASettings, seed: int) -> "list[AdaptedModule]":
        """Draws the factors of the layers of a chunk that the targets name."""
        found = []
        for name in self.sizes:
            if not _is_named(name, lora.targets):
                continue
            layer = chunk.hf.get_submodule(name)
            split = chunk.splits.get(f"{name}.weight")
            if split is not None and split.parts > 1:
                raise ValueError(f"{name} packs {split.parts} parts, each over several ranks: it can have no factors")
            layer.split_axis = None if split is None else split.axis
            layer.tp_group, layer.config = chunk.tp_group, chunk.config
            owner, _, last = (PREFIX + name).rpartition(".")
            found.append(AdaptedModule(owner, layer, [Projection(last, slice(0, len(layer.weight)))], lora, seed))
        return found


def _is_named(name: str, targets: Collection[str]) -> bool:
    """Whether PEFT's `target_modules` name a module."""
    return any(name == target or name.endswith(f".{target}") for target in targets)


class AdaptedModule(AdaptedLinear):
    """The factors of a linear layer of transformers."""

    def attach(self, is_used: bool = True):
        """As of `AdaptedLinear`, by the layer's own forward function."""
        layer = self.layer
        layer.adds_product = is_used and not self.product.is_merged
        vars(layer).pop("forward", None)
        if is_used:
            layer.forward = self._forward

    def _forward(self, x: Tensor) -> Tensor:
        """[…, K] -> […, N], with the bias."""
        weight, bias = self.layer.weight, self.layer.bias
        if x.numel() == 0:  # of an expert without tokens
            return x.new_zeros(*x.shape[:-1], len(weight))
        rows = at_least_rows(self._forward_impl, x.reshape(-1, x.shape[-1]), weight, bias, False, False)
        return rows.view(*x.shape[:-1], len(weight))
