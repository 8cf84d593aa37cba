"""The product of a linear layer that has low-rank factors: y = x·Wᵀ + s·(x·Aᵀ)·Bᵀ, and its gradients."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megarl.mcore.kernels.linear import Product, gather_tokens, input_gradient, matmul, weight_gradient


class LowRankProduct(NamedTuple):
    """How a layer multiplies; factors are passed as [(A [r, K], B [n, r])], one pair per projection.

    Under tensor parallelism a column-parallel layer holds its rows of B and the whole A; a row-parallel one its columns
    of A and the whole B; one whose ranks share query groups, and the first of Mamba-2, the whole A and the whole B, of
    which it uses rows.
    What is whole gets a part of its gradient on each rank; `group` adds them up.
    """

    rows: tuple[slice | Tensor, ...]  # of the output, for each projection
    scale: float
    is_merged: bool  # the weight is W + s·B·A; else the factors' product is added to the output
    is_row_parallel: bool
    group: Any  # tensor-parallel ranks of the layer; None: each has the whole layer
    multiply: Product = matmul  # in forward passes
    held: tuple[Tensor, ...] | None = None  # which rows of each B it uses, if each rank has the whole; None: all

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, factors: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[…, K] -> […, N]. Rollout and training call it, so their results are equal."""
        output = self.multiply(x, weight, bias)
        for rows, (a, b) in zip(self.rows, self.used(factors), strict=True) if not self.is_merged else ():
            if not len(b):
                continue
            change = self.multiply(self.multiply(x, a), b).mul_(self.scale)
            if isinstance(rows, slice):
                output[..., rows] += change
            else:
                output.index_add_(-1, rows, change)
        return output

    @property
    def has_whole_b(self) -> bool:
        """Whether each tensor-parallel rank has the whole B."""
        return self.is_row_parallel or self.group is None or self.held is not None

    def used(self, factors: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """The factors with those rows of B that this rank uses."""
        if self.held is None:
            return factors
        return [(a, b[held]) for (a, b), held in zip(factors, self.held, strict=True)]

    def projected_gradients(self, grad: Tensor, factors: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Output gradient […, N] -> for each projection its columns g […, n], and s·g·B […, r]."""
        parts = [grad[..., rows].contiguous() for rows in self.rows]
        return [
            (g, _input_gradient(g, b).mul_(self.scale)) for g, (_, b) in zip(parts, self.used(factors), strict=True)
        ]

    def factor_gradients(
        self, projected: list[tuple[Tensor, Tensor]], x: Tensor, factors: list[tuple[Tensor, Tensor]]
    ) -> list[Tensor]:
        """[dA, dB, dA, dB, …]: dA = s·(g·B)ᵀ·x and dB = s·gᵀ·(x·Aᵀ), summed over tensor-parallel ranks if whole."""
        grads = []
        for i, ((g, gb), (a, b)) in enumerate(zip(projected, factors, strict=True)):
            of_b = weight_gradient(g, matmul(x, a)).mul_(self.scale) if g.shape[-1] else g.new_zeros(0, len(a))
            of_b = of_b if self.held is None else torch.zeros_like(b).index_copy_(0, self.held[i], of_b)
            grads += [weight_gradient(gb, x), of_b]
        whole = grads[1::2] if self.is_row_parallel else grads if self.has_whole_b else grads[::2]
        if self.group is not None and dist.get_world_size(self.group) > 1:
            flat = torch.cat([part.flatten() for part in whole])
            dist.all_reduce(flat, group=self.group)
            for part, total in zip(whole, flat.split([part.numel() for part in whole]), strict=True):
                part.copy_(total.view(part.shape))
        return grads


def _input_gradient(grad: Tensor, b: Tensor) -> Tensor:
    """`input_gradient` [T, r]; zeros on a rank that has no row of the projection."""
    return input_gradient(grad, b) if len(b) else grad.new_zeros(*grad.shape[:-1], b.shape[1])


class _AdaptedLinear(torch.autograd.Function):
    """A linear layer whose weight gets no gradient, only its factors do."""

    @staticmethod
    def forward(ctx, x, weight, bias, product, sums_input_gradient, sequence_parallel, *factors):
        """Arguments as of `kernels.linear`; `factors` are A, B, A, B, …"""
        ctx.save_for_backward(x, weight, *factors)
        ctx.product, ctx.sums_input_gradient = product, sums_input_gradient
        ctx.sequence_parallel = sequence_parallel
        x = gather_tokens(x, product.group) if sequence_parallel else x
        return product.forward(x, weight, bias, _pairs(factors))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        """Overlaps the collective of the input gradient with the factors' gradients."""
        x, weight, *flat = ctx.saved_tensors
        product, factors = ctx.product, _pairs(flat)
        grad_x = handle = None
        projected = product.projected_gradients(grad, factors)
        if ctx.needs_input_grad[0]:
            grad_x = whole = input_gradient(grad, weight)
            for (_, gb), (a, _) in zip(projected, factors, strict=True) if not product.is_merged else ():
                whole += input_gradient(gb, a)
            if ctx.sequence_parallel:
                grad_x = whole.new_empty(len(whole) // dist.get_world_size(product.group), *whole.shape[1:])
                handle = dist.reduce_scatter_tensor(grad_x, whole, group=product.group, async_op=True)
            elif ctx.sums_input_gradient:
                handle = dist.all_reduce(grad_x, group=product.group, async_op=True)
        x = gather_tokens(x, product.group) if ctx.sequence_parallel else x
        grads = product.factor_gradients(projected, x, factors)
        if handle is not None:
            handle.wait()
        return grad_x, None, None, None, None, None, *grads


def _pairs(flat) -> list[tuple[Tensor, Tensor]]:
    return list(zip(flat[::2], flat[1::2], strict=True))


def adapted_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, product: LowRankProduct, factors: list[tuple[Tensor, Tensor]],
    sums_input_gradient: bool, sequence_parallel: bool,
) -> Tensor:  # fmt: skip
    """[…, K], under sequence parallelism this rank's [T/t, …, K] -> […, N]; only the factors get gradients."""
    if torch.is_grad_enabled():
        flat = [tensor for pair in factors for tensor in pair]
        return _AdaptedLinear.apply(x, weight, bias, product, sums_input_gradient, sequence_parallel, *flat)
    return product.forward(gather_tokens(x, product.group) if sequence_parallel else x, weight, bias, factors)
