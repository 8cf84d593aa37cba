"""What a pass of a module does on a GPU besides megarl's products, experts and attention: found without one.

A module is walked with tensors that have shapes and no values. Where the host needs a value, a decode step cannot be a
CUDA graph. Sums that the module makes itself keep it from an exact rollout: on a GPU the number of rows may change
their order.
"""

import sys

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from megarl.errors import one_line
from megarl.mcore.any_model import attention, rows, source
from megarl.mcore.any_model.attention import FirstPass
from megarl.mcore.any_model.recurrence import functions_of
from megarl.mcore.any_model.source import Source

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
    found, fake = Walk(), FakeTensorMode(allow_non_fake_inputs=True)
    stubs = rows.installed(rows.no_product, rows.no_matmul, lambda self, hidden, *_: torch.zeros_like(hidden))
    probe = FirstPass(tokens=source.PROBED, functions=functions_of(module))
    with torch.no_grad(), source.values_in(module), attention.running(probe), stubs, fake, found:
        tokens = torch.zeros(1, source.PROBED, dtype=torch.long)
        try:
            module(input_ids=tokens, position_ids=tokens, use_cache=False)
        except Exception as error:  # of what depends on numbers
            found.waits = f"{type(module).__name__} asks for numbers ({one_line(str(error))[:100]})"
    if probe.states:
        found.sums = f"{type(module).__name__} computes recurrences by chunks of tokens"
    return found


def inexact_part(model: Source) -> str | None:
    """What keeps an exact rollout on CUDA from this model; None: nothing that is known."""
    module = model.module(torch.bfloat16)
    rows.use_row_norms(module, lambda norm, x: x)
    found = walk(module)
    return found.sums or found.waits
