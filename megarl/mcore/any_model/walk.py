"""What a pass of a module does, found without its weights.

A module is walked with tensors that have shapes and no values. Where the host needs a value, a decode step cannot be a
CUDA graph. Sums that the module makes itself keep it from an exact rollout: on a GPU the number of rows may change
their order.

A pass with zeros finds which parts a text reaches. Others, as a tower of images or attention to an encoder, are not
trained, and neither is a parameter that transformers excludes, as the bias of a router's choice.
"""

import re
import sys
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from megarl.mcore.any_model import rows, source
from megarl.mcore.any_model.attention import Slot, Unsupported
from megarl.mcore.any_model.source import Source
from megarl.mcore.config.optimizer_flags import matches

# Operators that sum many terms, which a GPU does in an order that the number of rows may change.
PRODUCTS = {"addmm", "baddbmm", "bmm", "mm", "mv"}
BY_ROW = {"convolution", "cumsum", "native_group_norm", "native_layer_norm", "_fused_rms_norm"}
SUMS = {"linalg_vector_norm", "logsumexp", "mean", "prod", "std", "sum", "var", "var_mean"}
FEW = 32  # terms that a warp of a GPU adds, in any number of rows alike


class Walk(TorchDispatchMode):
    """What a pass of a module does besides megarl's products, experts and attention that matters on a GPU."""

    waits: str | None = None  # why the host needs numbers of the device within a pass; None: it does not
    sums: str | None = None  # a sum of many terms, and the module that makes it; None: there is none

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, out = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(args) if torch.is_tensor(each)]
        if name == "lift_fresh":
            self.waits = f"{_caller()} copies numbers of the host to it"
        if name in PRODUCTS | BY_ROW | SUMS and tensors[0].is_floating_point():
            terms = tensors[-2 if name in PRODUCTS else 0].shape[-1]
            if name in SUMS:
                results = next(each for each in tree_leaves(out) if torch.is_tensor(each))
                terms = tensors[0].numel() // max(results.numel(), 1)
            if terms > (1 if name in PRODUCTS else FEW):
                self.sums = f"{_caller()} computes {name} of {terms} terms itself"
        return out


def _caller() -> str:
    """Name of the innermost module that runs."""
    frame = sys._getframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), nn.Module):
        frame = frame.f_back
    return "the model" if frame is None else type(frame.f_locals["self"]).__name__


def walk(module: PreTrainedModel) -> Walk:
    """Walks a pass of a module whose parameters are on the meta device, without numbers."""
    found = Walk()
    experts = rows.installed(experts_function=lambda self, hidden, *_: torch.zeros_like(hidden))
    with experts, FakeTensorMode(allow_non_fake_inputs=True), found:
        try:
            source.find_slots(module, matmul=_matmul)
        except Unsupported as error:  # of what depends on numbers
            found.waits = f"{type(module).__name__} asks for numbers ({str(error).rpartition(': ')[2]}"
    if vars(module).get("state_shapes"):
        found.sums = f"{type(module).__name__} computes recurrences by chunks of tokens"
    return found


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """As `torch.matmul`, but nothing of what is megarl's product in a pass (`rows.matrix_product`)."""
    return rows.no_matmul(x, y) if y.dim() == 2 else rows.matrix_product(x, y)


def inexact_part(model: Source) -> str | None:
    """What keeps an exact rollout on CUDA from this model; None: nothing that is known."""
    module = model.module(torch.bfloat16)
    rows.use_row_norms(module, lambda norm, x: x)
    found = walk(module)
    return found.sums or found.waits


# -- what a text reaches -----------------------------------------------------------------------------------------------


class Reads(TorchFunctionMode):
    """Notes the parameters of which functions of torch make tensors, and of how many a `topk` chooses how many."""

    def __init__(self):
        super().__init__()
        self.ids: set[int] = set()
        self.stacks: set[int] = set()  # ids of parameters [E, …] of which a module takes single matrices
        self.choices: list[tuple[int, int]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(map(torch.is_tensor, tree_leaves(out))):
            self.ids.update(id(each) for each in tree_leaves((args, kwargs)) if isinstance(each, nn.Parameter))
        if func in (torch.topk, Tensor.topk):
            self.choices.append((args[0].shape[-1], out.indices.shape[-1]))
        if func is Tensor.__getitem__ and isinstance(args[0], nn.Parameter) and (args[0].dim(), out.dim()) == (3, 2):
            self.stacks.add(id(args[0]))
        return out


class Reach(NamedTuple):
    """A folder's module without values, and what a pass over text does with it. Nobody changes the module."""

    module: PreTrainedModel  # with the slots of its attention
    slots: tuple[Slot, ...]
    linears: dict[str, tuple[int, int]]  # rows and columns by name of the linear layers that can have factors
    experts: dict[str, tuple[int, int]]  # by name of a part with experts: how many, and how many a token uses
    untrained: tuple[str, ...]  # patterns of the names of parameters that no role trains
    state_shapes: tuple[tuple[int, ...], ...]  # of a sequence's recurrent states


def reach(module: PreTrainedModel) -> Reach:
    """Runs a pass of a module whose parameters are on the meta device. Raises Unsupported."""
    names, reads = {part: name for name, part in module.named_modules()}, Reads()
    called: set[str] = set()
    experts: dict[str, tuple[int, int]] = {}

    def note(part, hidden, chosen, gates):
        experts[names[part]] = part.num_experts, chosen.shape[1]
        return torch.zeros_like(hidden)

    hook = nn.modules.module.register_module_forward_pre_hook(lambda part, _: called.add(names[part]))
    try:
        with source.values_in(module), rows.installed(experts_function=note), reads:
            slots = source.find_slots(module)
            own = module.named_parameters(remove_duplicate=False)
            experts = experts or _own_experts(module, reads)
            read = {name for name, each in own if id(each) in reads.ids or name.rpartition(".")[0] in called}
    finally:
        hook.remove()
    shapes: Any = module.state_shapes
    untrained = _untrained(module, read)
    # The layers of PEFT's `all-linear`, without the head, without those that no role trains, as of a tower of images,
    # and without those that a part uses but does not call, which PEFT's factors do not reach either.
    linears = {
        name: (each.weight.shape[0], each.weight.shape[1])
        for name, each in module.named_modules()
        if isinstance(each, nn.Linear) and type(each).forward is nn.Linear.forward
        if each is not module.get_output_embeddings()
        if name in called or name.rpartition(".")[0] not in called
        if not matches(f"{name}.weight", untrained)
    }
    return Reach(module, slots, linears, experts, untrained, shapes)


def _own_experts(module: PreTrainedModel, reads: Reads) -> dict[str, tuple[int, int]]:
    """As `Reach.experts`: parts that take the matrices of single experts without transformers' interface. A router may
    choose among more than have matrices: the others add nothing, or the token itself."""
    found = {}
    for name, part in module.named_modules():
        for weight in part.parameters(recurse=False):
            counts = [count for among, count in reads.choices if id(weight) in reads.stacks and among >= len(weight)]
            found |= {name: (len(weight), max(counts))} if counts else {}
    return found


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
