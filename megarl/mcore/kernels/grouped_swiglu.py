"""The MLPs of several experts on rows grouped by expert: few operators around the products with their weights."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.mcore.kernels.linear import Product, at_least_rows, matmul, weight_gradient
from megarl.mcore.kernels.silu import silu
from megarl.mcore.kernels.swiglu_mlp import swiglu


def grouped_swiglu(
    x: Tensor, gates: Tensor, counts: list[int], first: Sequence, second: Sequence, multiply: Product = matmul
) -> Tensor:
    """Applies e's SwiGLU MLP (arXiv 2002.05202 eq. 5) to the rows of each expert e, times the rows' gates.

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
        return _GroupedSwiGLU.apply(x, gates, counts, multiply, *first, *second)
    # Without gradients, in rollout, experts have few rows: one operator for all is faster than one for each.
    both = [_product(*pair, multiply) for pair in zip(x.split(counts), first, strict=True)]
    gated = swiglu(torch.cat(both)).mul_(gates.unsqueeze(1))
    return torch.cat([_product(*pair, multiply) for pair in zip(gated.split(counts), second, strict=True)])


def _product(rows: Tensor, weight: Tensor, multiply: Product = matmul) -> Tensor:
    """[n, K] and weight [N, K] -> [n, N], with the kernel for `MIN_ROWS` rows or more."""
    return at_least_rows(multiply, rows, weight) if len(rows) else rows.new_empty(0, len(weight))


class _GroupedSwiGLU(torch.autograd.Function):
    """Runs expert by expert, so that an expert's activations stay in the cache of the processor. Saves the rows, the
    first products and the gates; backward computes the activations again."""

    @staticmethod
    def forward(ctx, x, gates, counts, multiply, *weights):
        first, second = weights[: len(counts)], weights[len(counts) :]
        both, outputs = [], []
        for rows, columns, *pair in zip(x.split(counts), gates.unsqueeze(1).split(counts), first, second, strict=True):
            both.append(_product(rows, pair[0], multiply))
            outputs.append(_product(swiglu(both[-1]).mul_(columns), pair[1], multiply))
        ctx.counts = counts
        ctx.save_for_backward(x, gates, *weights, *both)
        return torch.cat(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        counts, (x, gates, *rest) = ctx.counts, ctx.saved_tensors
        experts, columns = len(counts), gates.unsqueeze(1).split(counts)
        first, second = rest[:experts], rest[experts : 2 * experts]
        both = rest[2 * experts :]
        pieces = zip(grad.split(counts), x.split(counts), columns, first, second, both, strict=True)
        is_needed = ctx.needs_input_grad[4], ctx.needs_input_grad[-1]
        grad_x, grad_gates, *grads = zip(*(_backward(*piece, *is_needed) for piece in pieces), strict=True)
        return torch.cat(grad_x), torch.cat(grad_gates), None, None, *grads[0], *grads[1]


def _backward(grad, x, column, first, second, both, first_is_needed: bool, second_is_needed: bool):
    """Gradients of one expert's rows [n, H], gates [n] and weights, from that of its output [n, H].

    A weight without rows gets 0, not None, because hooks wait for the gradient of every weight.
    """
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
