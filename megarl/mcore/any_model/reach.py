"""What one pass over text does with the parts of a module: found without numbers, by what torch's functions are given.

A part that no text reaches, as a tower of images or attention to an encoder, is not trained, and neither is a
parameter that transformers excludes, as the bias of a router's choice.
"""

import functools
import re
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from megarl.mcore.any_model import rows, source
from megarl.mcore.any_model.attention import Slot


class Reads(TorchFunctionMode):
    """Notes the parameters of which functions of torch make tensors."""

    def __init__(self):
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(map(torch.is_tensor, tree_leaves(out))):
            self.ids.update(id(each) for each in tree_leaves((args, kwargs)) if isinstance(each, nn.Parameter))
        return out


class Reach(NamedTuple):
    """A folder's module without values, and what a pass over text does with it. Nobody changes the module."""

    module: PreTrainedModel  # with the slots of its attention
    slots: tuple[Slot, ...]
    called: frozenset[str]  # names of parts
    experts: dict[str, tuple[int, int]]  # by name of a part with experts: how many, and how many a token uses
    untrained: tuple[str, ...]  # patterns of the names of parameters


@functools.lru_cache(maxsize=8)
def of_path(path: str) -> Reach:
    """Of a folder that `source.of_path` reads. Raises Unsupported."""
    found = source.of_path(path)
    with source.one_line_errors(found.kind, "be built"):
        return reach(found.module(torch.float32))


def reach(module: PreTrainedModel) -> Reach:
    """Runs a pass of a module whose parameters are on the meta device. Raises Unsupported."""
    names, reads = {part: name for name, part in module.named_modules()}, Reads()
    called: set[str] = set()
    experts: dict[str, tuple[int, int]] = {}

    def note(part, hidden, chosen, gates):
        experts[names[part]] = part.num_experts, chosen.shape[1]
        return torch.zeros_like(hidden)

    hooks = [part.register_forward_pre_hook(lambda part, _: called.add(names[part])) for part in names]
    try:
        with source.values_in(module), rows.installed(experts_function=note), reads:
            slots = source.find_slots(module)
            own = module.named_parameters(remove_duplicate=False)
            read = {name for name, each in own if id(each) in reads.ids or name.rpartition(".")[0] in called}
    finally:
        for hook in hooks:
            hook.remove()
    return Reach(module, slots, frozenset(called), experts, _untrained(module, read))


def _untrained(module: nn.Module, read: Collection[str]) -> tuple[str, ...]:
    """Patterns of the parameters that are not read, or excluded: of whole parts where it is possible.

    Which experts of a list a pass calls depends on numbers: one of them stands for all of its layer.
    """
    own = list(module.named_parameters(remove_duplicate=False))
    kinds = {_kind(name) for name in read}
    trained = {id(each) for name, each in own if _kind(name) in kinds and each.requires_grad}  # by one of its names
    parts = {part for name, each in own if id(each) in trained for part in _parts(name)}
    others = (name for name, each in own if id(each) not in trained)
    return tuple(
        dict.fromkeys(next((f"{part}.*" for part in _parts(name) if part not in parts), name) for name in others)
    )


def _kind(name: str) -> str:
    """A name without the numbers after its layer's."""
    layer = re.match(r".*?\.\d+\.|", name)[0]
    return layer + re.sub(r"\d+", "*", name[len(layer) :])


def _parts(name: str) -> list[str]:
    """The parts that a parameter is in, the largest first."""
    return [name[: dot.start()] for dot in re.finditer(r"\.", name)]
