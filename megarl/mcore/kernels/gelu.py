"""Batch-invariant GELUs: a token's result does not depend on its position in the batch.

On a CPU the elements after a tensor's last two vectors use another tanh, erf or exp. Where rows are adjacent in memory
and not of whole pairs of vectors, those would be other elements in every batch, so rows are padded.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megarl.mcore.kernels.batch_invariance import VECTOR
from megarl.mcore.kernels.silu import by_whole_rows

SCALE, CUBIC = math.sqrt(2 / math.pi), 0.044715


def _padded(x: Tensor) -> Tensor:
    """[T, …, W] -> [T, …, ≥ W], rows of whole pairs of vectors."""
    extra = 0 if x.is_cuda else -x.shape[-1] % (2 * VECTOR)
    return functional.pad(x, (0, extra)) if extra else x


class _GELU(torch.autograd.Function):
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))); saves only x. torch's own kernel splits rows between threads."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (_tanh(x) + 1).mul_(x).mul_(0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        tanh = _tanh(x)
        inner = x.square().mul_(3 * CUBIC).add_(1).mul_(x).mul_(SCALE)  # x times the derivative of tanh's argument
        return (1 - tanh.square()).mul_(inner).add_(tanh).add_(1).mul_(grad).mul_(0.5)


def _tanh(x: Tensor) -> Tensor:
    inner = x.square().mul_(CUBIC).add_(1).mul_(x).mul_(SCALE)
    return by_whole_rows(torch.tanh, _padded(inner))[..., : x.shape[-1]]


def gelu(x: Tensor) -> Tensor:
    """x · Φ(x) with the normal distribution's Φ, of [T, …, W] (arXiv 1606.08415 §2)."""
    return by_whole_rows(functional.gelu, _padded(x))[..., : x.shape[-1]]


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU, of [T, …, W] (arXiv 1606.08415 §2)."""
    return _GELU.apply(x)


def quick_gelu(x: Tensor) -> Tensor:
    """x · σ(1.702 x) of [T, …, W] (arXiv 1606.08415 §2)."""
    return x * by_whole_rows(torch.sigmoid, _padded(1.702 * x))[..., : x.shape[-1]]
