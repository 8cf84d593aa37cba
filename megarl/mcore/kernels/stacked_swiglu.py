"""The MLPs of several experts as grouped matrix products: one kernel for all, whose rows the host need not know.

For CUDA devices in bf16. The experts' weights are parameters of their own, as checkpoints name them. `stack_` and
`moe.buffer_layout` lay them out at equal distances, so that a view of their memory is the stack that the kernel wants.
Weights that FSDP gathers have memory of their own, so that each product copies them.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from megarl.mcore.kernels.grouped_swiglu import activation_gradients
from megarl.mcore.kernels.swiglu_mlp import swiglu


def stack_of(weights: Sequence[Tensor]) -> Tensor:
    """[E, N, K] of E weights [N, K]: a view if they have one, else a copy."""
    view = view_of(weights)
    return torch.stack([weight.detach() for weight in weights]) if view is None else view


def view_of(weights: Sequence[Tensor]) -> Tensor | None:
    """[E, N, K] of E weights [N, K] that lie at equal distances in ascending order; None: they do not."""
    first, starts = weights[0].detach(), [weight.storage_offset() for weight in weights]
    distances = {after - before for before, after in itertools.pairwise(starts)}
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    distance = next(iter(distances), first.numel())
    if len(storages) > 1 or len(distances) > 1 or distance < first.numel():
        return None
    return first.as_strided((len(weights), *first.shape), (distance, *first.stride()))


def stack_(weights: Sequence[torch.nn.Parameter]):
    """Moves weights of one shape into one piece of memory, one after another."""
    for weight, part in zip(weights, torch.stack([weight.detach() for weight in weights]), strict=True):
        weight.data = part


def stacked_swiglu(x: Tensor, gates: Tensor, ends: Tensor, first: Sequence[Tensor], second: Sequence[Tensor]) -> Tensor:
    """As `grouped_swiglu`, with the end [E] int32 of each expert's rows on the device; reads nothing on the host.

    Without gradients there may be more rows than the last expert's; what is returned for them is not defined.
    """
    if torch.is_grad_enabled():
        return _StackedSwiGLU.apply(x, gates, ends, *first, *second)
    gated = swiglu(_forward(_packed(x), first, ends)).mul_(gates.unsqueeze(1))
    return _forward(gated, second, ends)


def _packed(rows: Tensor) -> Tensor:
    """Contiguous rows, of which even a single one has the stride of several: the kernel wants rows to begin at
    multiples of 16 bytes."""
    return rows.contiguous().as_strided(rows.shape, (rows.shape[1], 1))


def _forward(rows: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Rows [P, K] of experts that end at `ends` [E], and weights [N, K] -> [P, N]."""
    return grouped_mm(rows, stack_of(weights).transpose(1, 2), offs=ends)


def _input_gradient(grad: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Gradient [P, N] of the outputs -> [P, K] of the rows."""
    return grouped_mm(grad, stack_of(weights), offs=ends)


def _weight_gradients(grad: Tensor, rows: Tensor, ends: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradient [P, N] of the outputs, rows [P, K] -> [N, K] of each expert; 0 without rows.

    Adds them to Megatron's buffer by one kernel instead of one for each expert, where it has a stack of them.
    """
    found = grouped_mm(grad.t(), rows, offs=ends)
    if all(hasattr(weight, "grad_added_to_main_grad") for weight in weights):
        total = view_of([weight.main_grad for weight in weights])
        if total is not None:
            total.add_(found)
            for weight in weights:
                weight.grad_added_to_main_grad = True
    return found.unbind()


class _StackedSwiGLU(torch.autograd.Function):
    """Saves the rows, the first products and the gates; backward computes the activations again."""

    @staticmethod
    def forward(ctx, x, gates, ends, *weights):
        experts, x = len(ends), _packed(x)
        both = _forward(x, weights[:experts], ends)
        ctx.save_for_backward(x, gates, ends, both, *weights)
        return _forward(swiglu(both).mul_(gates.unsqueeze(1)), weights[experts:], ends)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, gates, ends, both, *weights = ctx.saved_tensors
        experts, grad = len(ends), _packed(grad)
        first, second = weights[:experts], weights[experts:]
        grad_both, grad_gates, gated = activation_gradients(
            _input_gradient(grad, second, ends), both, gates.unsqueeze(1)
        )
        is_needed, none = (ctx.needs_input_grad[3], ctx.needs_input_grad[-1]), (None,) * experts
        grad_first = _weight_gradients(grad_both, x, ends, first) if is_needed[0] else none
        grad_second = _weight_gradients(grad, gated, ends, second) if is_needed[1] else none
        return _input_gradient(grad_both, first, ends), grad_gates, None, *grad_first, *grad_second
