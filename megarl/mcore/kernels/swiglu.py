"""SwiGLU MLPs (arXiv 2002.05202 eq. 5) with few passes over the activations: of dense layers, and of several experts.

The MLPs of experts run one after another, or, on CUDA in bf16, as grouped products: one kernel for all, whose rows the
host need not know. The experts' weights are parameters of their own, as checkpoints name them. `stack_` and
`moe.layer.stacked_experts` lay them out at equal distances: a view of their memory is the stack that the kernel wants.
"""

import itertools
from collections.abc import Sequence

import torch
from megatron.core.transformer.mlp import MLP
from torch import Tensor
from torch.nn.functional import grouped_mm

from megarl.mcore.kernels import native, with_gradient
from megarl.mcore.kernels.batch_invariance import silu
from megarl.mcore.kernels.linear import Product, apply_linear, at_least_rows, matmul, weight_gradient


def _activated_gradient(ctx, grad):
    """[…, F] -> […, 2F], in one pass where a kernel computes it."""
    (x,) = ctx.saved_tensors
    if native.supports(x, grad):
        return native.ops.swiglu_backward(grad.contiguous(), x)
    if x.is_cuda:
        from megarl.mcore.kernels.cuda.mlp_rows import swiglu_rows_backward  # needs Triton

        return swiglu_rows_backward(grad.reshape(-1, grad.shape[-1]).contiguous(), x.flatten(0, -2)).view(x.shape)
    (gate, up), grad_x = x.chunk(2, dim=-1), torch.empty_like(x)
    grad_gate, grad_up = grad_x.chunk(2, dim=-1)
    torch.mul(grad, torch.nn.functional.silu(gate), out=grad_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
    return grad_x


@with_gradient(_activated_gradient)
def _activated(ctx, x):
    """x […, 2F] -> […, F] = silu(first half) · second half; saves only x for backward."""
    x = x.contiguous()
    ctx.save_for_backward(x)
    return swiglu(x)


def swiglu(x: Tensor) -> Tensor:
    """[…, 2F] -> […, F]; differentiable only through `activated`."""
    if native.supports(x):
        return native.ops.swiglu(x.contiguous())
    if x.is_cuda:
        from megarl.mcore.kernels.cuda.mlp_rows import swiglu_rows  # needs Triton

        return swiglu_rows(x.reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], x.shape[-1] // 2)
    gate, up = x.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def activated(x: Tensor) -> Tensor:
    """As `swiglu`, differentiable once."""
    return _activated(x) if torch.is_grad_enabled() else swiglu(x)


def is_plain_swiglu(config) -> bool:
    """Whether MLPs or experts with this config are two products with `swiglu` between them."""
    c = config
    others = c.add_bias_linear, c.glu_linear_offset, c.bias_activation_fusion, c.use_te_activation_func
    return (
        c.gated_linear_unit and c.activation_func is silu and c.activation_func_clamp_value is None and not any(others)
    )


class SwiGLUMLP(MLP):
    """MLP without the zero offset that Megatron adds to the linear half; saves one tensor for backward, not four."""

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.is_plain_swiglu = is_plain_swiglu(self.config)

    def forward(self, hidden: Tensor, **options) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] (under sequence parallelism, this rank's tokens) -> output of that shape, and a bias to add."""
        is_called_plainly = all(option is None for option in options.values())  # Megatron's layer passes empty ones
        if not self.is_plain_swiglu or not is_called_plainly:
            return super().forward(hidden, **options)
        both, _ = apply_linear(self.linear_fc1, hidden)
        return apply_linear(self.linear_fc2, activated(both))


# -- experts, one after another ------------------------------------------------------------------------------------


def grouped_swiglu(
    x: Tensor, gates: Tensor, counts: list[int], first: Sequence, second: Sequence, multiply: Product = matmul
) -> Tensor:
    """Applies e's SwiGLU MLP to the rows of each expert e, times the rows' gates.

    A row's result does not depend on the other rows: an expert with fewer than `MIN_ROWS` repeats its last one.

    Args:
        x: [P, H] rows, grouped by expert in ascending order.
        gates: [P] factor of each row.
        counts: rows of each of E experts; their sum is P.
        first, second: weights [2F, H] and [H, F] of each expert.
        multiply: product of forward passes.

    Returns:
        [P, H]. Differentiable once.
    """
    if torch.is_grad_enabled():
        weights = [*first, *second]
        return _grouped_swiglu(x, gates, counts, multiply, *weights)
    # Without gradients, in rollout, experts have few rows: one operator for all is faster than one for each.
    both = [_product(rows, weight, multiply) for rows, weight in zip(x.split(counts), first, strict=True)]
    gated = swiglu(torch.cat(both)).mul_(gates.unsqueeze(1))
    rows_of_experts = zip(gated.split(counts), second, strict=True)
    return torch.cat([_product(rows, weight, multiply) for rows, weight in rows_of_experts])


def _product(rows: Tensor, weight: Tensor, multiply: Product = matmul) -> Tensor:
    return at_least_rows(multiply, rows, weight) if len(rows) else rows.new_empty(0, len(weight))


def _grouped_swiglu_gradient(ctx, grad):
    counts, (x, gates, *rest) = ctx.counts, ctx.saved_tensors
    experts, columns = len(counts), gates.unsqueeze(1).split(counts)
    first, second = rest[:experts], rest[experts : 2 * experts]
    both = rest[2 * experts :]
    pieces = zip(grad.split(counts), x.split(counts), columns, first, second, both, strict=True)
    is_needed = ctx.needs_input_grad[4], ctx.needs_input_grad[-1]
    grad_x, grad_gates, *grads = zip(*(_expert_gradients(piece, is_needed) for piece in pieces), strict=True)
    return torch.cat(grad_x), torch.cat(grad_gates), None, None, *grads[0], *grads[1]


@with_gradient(_grouped_swiglu_gradient)
def _grouped_swiglu(ctx, x, gates, counts, multiply, *weights):
    """Runs expert by expert, so that an expert's activations stay in the cache of the processor. Saves the rows, the
    first products and the gates; backward computes the activations again."""
    first, second = weights[: len(counts)], weights[len(counts) :]
    both, outputs = [], []
    columns = gates.unsqueeze(1).split(counts)
    for rows, column, one, other in zip(x.split(counts), columns, first, second, strict=True):
        both.append(_product(rows, one, multiply))
        outputs.append(_product(swiglu(both[-1]).mul_(column), other, multiply))
    ctx.counts = counts
    ctx.save_for_backward(x, gates, *weights, *both)
    return torch.cat(outputs)


def _expert_gradients(piece: tuple[Tensor, ...], is_needed: tuple[bool, bool]):
    """Gradients of one expert's rows [n, H], gates [n] and weights, from that of its output [n, H].

    A weight without rows gets 0, not None, because hooks wait for the gradient of every weight.

    Args:
        piece: (gradient of the output, rows, gates [n, 1], both weights, first product [n, 2F]).
        is_needed: whether the gradients of the first and of the second weight are.
    """
    grad, x, column, first, second, both = piece
    first_is_needed, second_is_needed = is_needed
    grad_both, grad_column, gated = activation_gradients(_product(grad, second.t()), both, column)
    grad_second = weight_gradient(grad, gated) if second_is_needed else None
    grad_first = weight_gradient(grad_both, x) if first_is_needed else None
    return _product(grad_both, first.t()), grad_column, grad_first, grad_second


def activation_gradients(grad_gated: Tensor, both: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of `both` [n, 2F] and of the gates [n], and again the gated activations [n, F].

    `grad_gated` [n, F]: of the gated activations; overwritten. `column`: the gates [n, 1].
    """
    (gate, up), grad_both = both.chunk(2, dim=-1), torch.empty_like(both)
    grad_gate, grad_up = grad_both.chunk(2, dim=-1)
    activated = silu(gate)
    product = activated * up
    grad_column = torch.mul(grad_gated, product, out=grad_up).sum(1)
    gated = product.mul_(column)
    torch.mul(grad_gated.mul_(column), activated, out=grad_up)
    torch.mul(grad_gated, up, out=activated)
    torch.ops.aten.silu_backward.grad_input(activated, gate, grad_input=grad_gate)
    return grad_both, grad_column, gated


# -- experts by grouped products -----------------------------------------------------------------------------------


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


def stacked_swiglu(
    x: Tensor,
    gates: Tensor,
    ends: Tensor,
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    places: Tensor | None = None,
) -> Tensor:
    """As `grouped_swiglu`, with the end [E] int32 of each expert's rows on the device; reads nothing on the host.

    Without gradients there may be more rows than the last expert's; what is returned for them is not defined. `places`
    [P] int64: where among any number of `gates` those of the rows are, each at a place of its own.
    """
    if torch.is_grad_enabled():
        weights = [*first, *second]
        return _stacked_swiglu(x, gates, ends, places, *weights)
    return _grouped_product(_gated(_grouped_product(_packed(x), first, ends), gates, places), second, ends)


def _gated(both: Tensor, gates: Tensor, places: Tensor | None) -> Tensor:
    """[n, 2F] and gates -> [n, F] = swiglu(both) · the rows' gates."""
    if both.is_cuda:
        from megarl.mcore.kernels.cuda.mlp_rows import swiglu_gated  # needs Triton

        return swiglu_gated(both, gates, places)
    return swiglu(both).mul_((gates if places is None else gates[places]).unsqueeze(1))


def _gated_gradients(grad: Tensor, both: Tensor, gates: Tensor, places: Tensor | None) -> Sequence[Tensor]:
    """As `activation_gradients`, with the gates of `_gated`."""
    if both.is_cuda:
        from megarl.mcore.kernels.cuda.mlp_rows import swiglu_gated_backward  # needs Triton

        return swiglu_gated_backward(grad, both, gates, places)
    own = gates if places is None else gates[places]
    grad_both, grad_own, gated = activation_gradients(grad, both, own.unsqueeze(1))
    grad_gates = grad_own if places is None else torch.zeros_like(gates).index_copy_(0, places, grad_own)
    return grad_both, grad_gates, gated


def _packed(rows: Tensor) -> Tensor:
    """Contiguous rows, of which even a single one has the stride of several: the kernel wants rows to begin at
    multiples of 16 bytes."""
    return rows.contiguous().as_strided(rows.shape, (rows.shape[1], 1))


def _grouped_product(rows: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Rows [P, K] of experts that end at `ends` [E], and weights [N, K] -> [P, N]."""
    return grouped_mm(rows, stack_of(weights).transpose(1, 2), offs=ends)


def _input_gradient(grad: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
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


def _stacked_swiglu_gradient(ctx, grad):
    x, gates, ends, places, both, *weights = ctx.saved_tensors
    experts, grad = len(ends), _packed(grad)
    first, second = weights[:experts], weights[experts:]
    grad_both, grad_gates, gated = _gated_gradients(_input_gradient(grad, second, ends), both, gates, places)
    is_needed, none = (ctx.needs_input_grad[4], ctx.needs_input_grad[-1]), (None,) * experts
    grad_first = _weight_gradients(grad_both, x, ends, first) if is_needed[0] else none
    grad_second = _weight_gradients(grad, gated, ends, second) if is_needed[1] else none
    return _input_gradient(grad_both, first, ends), grad_gates, None, None, *grad_first, *grad_second


@with_gradient(_stacked_swiglu_gradient)
def _stacked_swiglu(ctx, x, gates, ends, places, *weights):
    """Saves the rows, the first products and the gates; backward computes the activations again."""
    experts, x = len(ends), _packed(x)
    both = _grouped_product(x, weights[:experts], ends)
    ctx.save_for_backward(x, gates, ends, places, both, *weights)
    return _grouped_product(_gated(both, gates, places), weights[experts:], ends)
