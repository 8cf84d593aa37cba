"""Batch-invariant GELU."""

from torch import Tensor
from torch.nn import functional

from megarl.mcore.kernels.silu import by_whole_rows


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))) of [T, …, W] (arXiv 1606.08415 §2)."""
    return by_whole_rows(lambda rows: functional.gelu(rows, approximate="tanh"), x)
