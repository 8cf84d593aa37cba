"""Recurrent states instead of attention over keys: runs of rows that continue states, the gated delta rule, Mamba-2's
state space.

What all recurrent layers share: their sizes, and results of their rules with gradients, by compiled kernels token by
token or by chunks. The backward pass computes everything again from a layer's inputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megarl.mcore.kernels import native, with_gradient
from megarl.mcore.recurrence.delta_rule import HeadSizes, Inputs
from megarl.mcore.recurrence.runs import AnyRuns, States
from megarl.mcore.recurrence.state_space import SpaceInputs, SpaceSizes

AnyInputs = Inputs | SpaceInputs


def layer_sizes(config, ranks: int) -> HeadSizes | SpaceSizes:
    """Sizes of a model's recurrent layers on a tensor-parallel rank; `config`: its own or its role's namespace."""
    if config.hybrid_layer_pattern is None:
        return HeadSizes.of(config, ranks)
    groups, heads = config.mamba_num_groups // ranks, config.mamba_num_heads // ranks
    return SpaceSizes(groups, heads, config.mamba_state_dim, config.mamba_head_dim, config.mamba_dt_min)


def has_kernels(x: Tensor) -> bool:
    """Whether compiled kernels compute the rules on the device of a tensor."""
    return not x.is_cuda and native.is_built()


def own_states(x: Tensor, sizes, runs) -> States:
    """Uninitialized states of a pass's `Runs` alone; other arguments as of `States.shapes`."""
    return States(*map(x.new_empty, States.shapes(runs.states, runs.taps, sizes)))


def apply_rule(inputs: Any, sizes, runs: AnyRuns, states: States | None = None) -> Tensor:
    """[T, H, V]: what each row reads of `AnyInputs`, or of inputs with their methods; runs change `states` in place.
    None: the runs name states of their own."""
    if states is not None or not torch.is_grad_enabled():
        return _read(inputs, sizes, runs, states)
    kind: Any = type(inputs)

    def forward(*fields: Tensor) -> tuple[Tensor, Tensor | None]:
        states = own_states(fields[0], sizes, runs) if has_kernels(fields[0]) else None
        return _read(kind._make(fields), sizes, runs, states), None if states is None else states.memories

    def backward(grad: Tensor, memories: Tensor | None, *fields: Tensor):
        own = kind(*(x.detach().requires_grad_() for x in fields))
        with torch.enable_grad():
            if memories is None:
                results, grads = own.by_chunks(sizes, runs), grad
            else:
                results, grads = own.token_gradients(grad, sizes, runs, memories)
        return torch.autograd.grad(results, own, grads)

    return trained(forward, backward, *inputs)


def _read(inputs: Any, sizes, runs: AnyRuns, states: States | None) -> Tensor:
    if isinstance(runs, Tensor):
        return inputs.one_token(sizes, runs, states)
    if has_kernels(inputs.x):
        return inputs.by_token(sizes, runs, own_states(inputs.x, sizes, runs) if states is None else states)
    if states is not None and inputs.one_token is not None and runs.decodes is not None:
        return inputs.one_token(sizes, runs.decodes, states)
    return inputs.by_chunks(sizes, runs, states)


def _trained_gradient(ctx, grad: Tensor):
    kept, *fields = ctx.saved_tensors
    return None, None, *ctx.backward(grad, kept, *fields)


@with_gradient(_trained_gradient)
def trained(ctx, forward: Callable, backward: Callable, *fields: Tensor | None) -> Tensor:
    """What a rule reads of its fields, with gradients.

    Args:
        forward: fields -> (what rows read, the states that `backward` gets).
        backward: (gradient of what rows read, states, fields) -> gradients of the fields.
    """
    read, kept = forward(*fields)
    ctx.backward = backward
    ctx.save_for_backward(kept, *fields)
    return read
