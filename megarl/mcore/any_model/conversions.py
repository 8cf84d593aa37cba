"""How the tensors of a folder become the weights of transformers' module, and back: by transformers' own conversions.

Many folders keep names, or single experts, that the classes of transformers do not have. The conversions are applied
group by group, so that only the tensors of one group are in memory.
"""

import copy
import re
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

Shape = tuple[int, ...]


class Group(NamedTuple):
    """Weights of a module that are made of the same tensors of a folder."""

    weights: dict[str, Shape]  # by name; of parameters and persistent buffers
    sources: dict[str, str]  # name of a tensor -> the pattern by which a conversion takes it, or the name itself
    conversion: WeightConverter | WeightRenaming


class Conversions:
    """The groups of a folder's tensors, and the tensors and weights that belong to none."""

    def __init__(self, module: PreTrainedModel, tensors: dict[str, Shape]):
        """`module`: without values; `tensors`: shape by name, of the folder."""
        self.module = module
        self.weights = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        self.tied: dict[str, str] = dict(module.all_tied_weights_keys)  # weight -> the one that it is
        self.groups: list[Group] = []
        found, used = self._matched(tensors)
        module._weight_conversions = used
        for first, (conversion, sources) in found.items():
            made = converted(conversion, first, sources, lambda name: torch.empty(tensors[name], device="meta"), module)
            shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
            self.groups.append(Group(shapes, sources, conversion))
        self.unknown = sorted(tensors.keys() - {name for group in self.groups for name in group.sources})
        given = {name for group in self.groups for name in group.weights}
        given |= {weight for weight, source in self.tied.items() if source in given}
        given |= {source for weight, source in self.tied.items() if weight in given}
        self.missing = sorted(self.weights.keys() - given - self._ignored(self.weights, "missing"))
        self.unused = self._ignored(self.unknown, "unexpected")  # tensors that transformers does not read
        self.unknown = sorted(set(self.unknown) - self.unused)

    def _matched(self, names: Iterable[str]):
        """First weight -> (conversion, sources), and the conversions that a name of the folder used."""
        module, mapping = self.module, get_model_conversion_mapping(self.module)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        prefix, state = module.base_model_prefix, module.state_dict()
        found: dict[str, tuple] = {}
        for name in sorted(names, key=dot_natural_key):
            weight, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if weight not in state and name in state:
                weight, pattern = rename_source_key(name, [], [], prefix, state)
            if weight not in state:
                continue
            conversion = WeightRenaming(name, weight) if pattern is None else by_pattern[pattern]
            found.setdefault(weight, (conversion, {}))[1][name] = pattern or name
        return found, [each for each in mapping if each.was_used()]

    def _ignored(self, names: Collection[str], kind: str) -> set[str]:
        """Names that transformers' class says may be missing in, or unexpected of, a folder."""
        patterns = getattr(self.module, f"_keys_to_ignore_on_load_{kind}", None) or ()
        return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}

    def reverted(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a folder that a whole group's weights become."""
        if len(weights) == 1:
            (name,) = weights
            group = next(group for group in self.groups if name in group.weights)
            if isinstance(group.conversion, WeightRenaming):
                return {next(iter(group.sources)): weights[name]}
        return revert_weight_conversion(self.module, weights)


def converted(
    conversion, first: str, sources: dict[str, str], read: Callable[[str], Tensor], module: PreTrainedModel
) -> dict[str, Tensor]:
    """The weights of a group by name.

    Args:
        first: the first weight's name.
        read: the tensor of a name.
    """
    own = copy.deepcopy(conversion)
    for name, pattern in sources.items():
        own.add_tensor(first, name, pattern, read(name))
    made = own.convert(first, model=module, config=module.config)
    return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}
