"""A rule of recurrent layers, by compiled kernels token by token or by PyTorch's operations, with its gradients.

The backward pass computes everything again from the layer's inputs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.mcore.recurrence.runs import AnyRuns, DeviceRuns
from megarl.mcore.recurrence.states import States, has_kernels, own_states


class Rule(NamedTuple):
    """How rows change and read states. Functions take a layer's inputs, sizes, `Runs` and `States`, and give [T, H, V].

    Inputs are a named tuple whose first field `x` has the rows.
    """

    by_token: Callable  # by compiled kernels
    one_token: Callable  # on CUDA, in a decode step; of the runs it takes the state of each row
    by_chunks: Callable  # by PyTorch's operations, which have gradients if states are None
    # Backward of `by_token`: (grad [T, H, V], inputs, sizes, runs, memories of the pass) -> tensors that PyTorch's
    # operations gave from the inputs, and their gradients.
    token_gradients: Callable


def apply_rule(rule: Rule, inputs, sizes, runs: AnyRuns, states: States | None) -> Tensor:
    """[T, H, V]: what each row reads; the runs change `states` in place. None: the runs name states of their own."""
    if states is None and torch.is_grad_enabled():
        return _Trained.apply(rule, type(inputs), sizes, runs, *inputs)
    return _forward(rule, inputs, sizes, runs, states)


def _forward(rule: Rule, inputs, sizes, runs: AnyRuns, states: States | None) -> Tensor:
    if isinstance(runs, DeviceRuns):
        return rule.one_token(inputs, sizes, runs.decodes, states)
    if has_kernels(inputs.x):
        return rule.by_token(inputs, sizes, runs, own_states(inputs.x, sizes, runs) if states is None else states)
    if states is not None and runs.decodes is not None:
        return rule.one_token(inputs, sizes, runs.decodes, states)
    return rule.by_chunks(inputs, sizes, runs, states)


class _Trained(torch.autograd.Function):
    """Backward computes states again: on a CPU those of tokens, else of chunks."""

    @staticmethod
    def forward(ctx, rule, kind, sizes, runs, *inputs):
        found = kind(*inputs)
        states = own_states(found.x, sizes, runs) if has_kernels(found.x) else None
        ctx.save_for_backward(*inputs, *([] if states is None else [states.memories]))
        ctx.rule, ctx.kind, ctx.sizes, ctx.runs = rule, kind, sizes, runs
        return _forward(rule, found, sizes, runs, states)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Gradients of the inputs from those of what was read [T, H, V]."""
        count = len(ctx.kind._fields)
        saved, memories = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        inputs = ctx.kind(*(x.detach().requires_grad_() for x in saved))
        with torch.enable_grad():
            if memories:
                results, grads = ctx.rule.token_gradients(grad, inputs, ctx.sizes, ctx.runs, *memories)
            else:
                results, grads = ctx.rule.by_chunks(inputs, ctx.sizes, ctx.runs), grad
        return None, None, None, None, *torch.autograd.grad(results, inputs, grads)
