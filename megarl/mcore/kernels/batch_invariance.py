"""What makes kernels batch-invariant: a token's results do not depend on the rest of the batch (docs/exactness.md).

On a CPU sizes suffice: products of fewer than `MIN_ROWS` rows use another BLAS kernel, a softmax row that does not fill
whole vectors of `VECTOR` elements is summed in another order; extra rows and keys are padding. Element-wise functions
depend on places, too: the elements after the last vectors of a thread's share use another exp or tanh; those here do
not. On CUDA it takes other kernels (`kernels.cuda`), which a model of an exact rollout uses.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from megarl.mcore.kernels import with_gradient

MIN_ROWS = 4
VECTOR = 16
GRAIN = 32768  # minimum elements per thread in torch's element-wise operations
SCALE, CUBIC = math.sqrt(2 / math.pi), 0.044715


def is_exact(config) -> bool:
    """Whether a model with this config uses the kernels of `--exact-rollout` on CUDA in its forward passes."""
    return getattr(config, "exact_rollout", False)


def silu(x: Tensor) -> Tensor:
    """x · σ(x) of [T, …, W] (arXiv 1702.03118 eq. 9)."""
    return by_whole_rows(functional.silu, x)


def by_whole_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies an element-wise function to [T, …, W], of any width, so that threads get whole rows of whole vectors.

    CPU threads get equal shares of the elements. If a share ends inside a row, its last elements do not fill a vector
    and use another exp. So the largest leading block of rows that splits into whole rows is computed separately.
    """
    if x.is_cuda:
        return function(x)
    width, x = x.shape[-1], functional.pad(x, (0, extra)) if (extra := -x.shape[-1] % (2 * VECTOR)) else x
    head = _shared_rows(x.shape[0], x.numel())
    if head == x.shape[0]:
        return function(x)[..., :width]
    return torch.cat([function(rows) for rows in x.split([head, x.shape[0] - head]) if len(rows)])[..., :width]


def _shared_rows(rows: int, elements: int) -> int:
    """Returns the most of `rows` (with `elements` in total) that threads split into whole rows; all if none do."""
    width, all_rows = elements // max(rows, 1), rows
    while rows and rows % max(1, min(torch.get_num_threads(), -(-rows * width // GRAIN))):
        rows -= 1
    return rows or all_rows


def _gelu_tanh_gradient(ctx, grad):
    (x,) = ctx.saved_tensors
    tanh = _tanh(x)
    inner = x.square().mul_(3 * CUBIC).add_(1).mul_(x).mul_(SCALE)  # x times the derivative of tanh's argument
    return (1 - tanh.square()).mul_(inner).add_(tanh).add_(1).mul_(grad).mul_(0.5)


@with_gradient(_gelu_tanh_gradient)
def _gelu_tanh(ctx, x):
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))); saves only x. torch's own kernel splits rows between threads."""
    ctx.save_for_backward(x)
    return (_tanh(x) + 1).mul_(x).mul_(0.5)


def _tanh(x: Tensor) -> Tensor:
    inner = x.square().mul_(CUBIC).add_(1).mul_(x).mul_(SCALE)
    return by_whole_rows(torch.tanh, inner)


def gelu(x: Tensor) -> Tensor:
    """x · Φ(x) with the normal distribution's Φ, of [T, …, W] (arXiv 1606.08415 §2)."""
    return by_whole_rows(functional.gelu, x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh form of GELU, of [T, …, W] (arXiv 1606.08415 §2)."""
    return _gelu_tanh(x)


def quick_gelu(x: Tensor) -> Tensor:
    """x · σ(1.702 x) of [T, …, W] (arXiv 1606.08415 §2)."""
    return x * sigmoid(1.702 * x)


def sigmoid(x: Tensor) -> Tensor:
    """σ(x) of [T, …, W], of any width."""
    return by_whole_rows(torch.sigmoid, x)
