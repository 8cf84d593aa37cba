"""The rule of any recurrent layer: its sizes, and its results with gradients, by compiled kernels token by token or by
PyTorch's operations.

The backward pass computes everything again from the layer's inputs.
"""

import torch
from torch import Tensor

from megarl.mcore.kernels import with_gradient
from megarl.mcore.recurrence.delta_rule import HeadSizes, Inputs
from megarl.mcore.recurrence.runs import AnyRuns, States, has_kernels, own_states
from megarl.mcore.recurrence.state_space import SpaceInputs, SpaceSizes

AnyInputs = Inputs | SpaceInputs


def layer_sizes(config, ranks: int) -> HeadSizes | SpaceSizes:
    """Sizes of a model's recurrent layers on a tensor-parallel rank; `config`: its own or its role's namespace."""
    if config.hybrid_layer_pattern is None:
        return HeadSizes.of(config, ranks)
    groups, heads = config.mamba_num_groups // ranks, config.mamba_num_heads // ranks
    return SpaceSizes(groups, heads, config.mamba_state_dim, config.mamba_head_dim, config.mamba_dt_min)


def apply_rule(inputs: AnyInputs, sizes, runs: AnyRuns, states: States | None = None) -> Tensor:
    """[T, H, V]: what each row reads; the runs change `states` in place. None: the runs name states of their own."""
    if states is None and torch.is_grad_enabled():
        return _trained(type(inputs), sizes, runs, *inputs)
    return _forward(inputs, sizes, runs, states)


def _forward(inputs: AnyInputs, sizes, runs: AnyRuns, states: States | None) -> Tensor:
    if isinstance(runs, Tensor):
        return inputs.one_token(sizes, runs, states)
    if has_kernels(inputs.x):
        return inputs.by_token(sizes, runs, own_states(inputs.x, sizes, runs) if states is None else states)
    if states is not None and runs.decodes is not None:
        return inputs.one_token(sizes, runs.decodes, states)
    return inputs.by_chunks(sizes, runs, states)


def _trained_gradient(ctx, grad):
    """Gradients of the inputs from those of what was read [T, H, V]."""
    count = len(ctx.kind._fields)
    saved, memories = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
    inputs = ctx.kind(*(x.detach().requires_grad_() for x in saved))
    with torch.enable_grad():
        if memories:
            results, grads = inputs.token_gradients(grad, ctx.sizes, ctx.runs, memories[0])
        else:
            results, grads = inputs.by_chunks(ctx.sizes, ctx.runs), grad
    return None, None, None, *torch.autograd.grad(results, inputs, grads)


@with_gradient(_trained_gradient)
def _trained(ctx, kind, sizes, runs, *inputs):
    """Backward computes states again: on a CPU those of tokens, else of chunks."""
    found = kind._make(inputs)
    states = own_states(found.x, sizes, runs) if has_kernels(found.x) else None
    ctx.save_for_backward(*inputs, *([] if states is None else [states.memories]))
    ctx.kind, ctx.sizes, ctx.runs = kind, sizes, runs
    return _forward(found, sizes, runs, states)
