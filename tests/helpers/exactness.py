"""How close rollout and training must be on this machine: to the bit if its products give a row the same result in
every matrix of at least `MIN_ROWS` rows, which is what megarl's exactness rests on (docs/exactness.md)."""

import functools

import torch

from megarl.mcore.kernels import native
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.kernels.linear import matmul


def largest_gap_allowed(dtype: torch.dtype = torch.float32) -> float:
    """0.0 with the compiled kernels, whose rows do not depend on each other; else as of `largest_gap_of_operators`."""
    return 0.0 if native.is_used() and dtype == torch.float32 else largest_gap_of_operators(dtype)


@functools.cache
def largest_gap_of_operators(dtype: torch.dtype = torch.float32) -> float:
    """0.0 on a machine whose matrix products do not depend on the number of rows, else 1e-5; of bf16 else 0.1."""
    generator = torch.Generator().manual_seed(0)
    for inner, outer in ((32, 64), (32, 128), (64, 32), (128, 352), (352, 128), (256, 768), (768, 256)):
        rows, weight = (torch.randn(count, inner, generator=generator).to(dtype) for count in (300, outer))
        whole = matmul(rows, weight)
        parts = [matmul(rows[:count], weight) for count in (MIN_ROWS, 5, 8, 13, 64, 100, 200)]
        if not all(torch.equal(part, whole[: len(part)]) for part in parts):
            return 1e-5 if dtype == torch.float32 else 0.1
    return 0.0


# What a decode step and a training forward of PyTorch's attention may differ by where `sums_ignore_zeros` is false.
ROUNDING = 1e-6


@functools.cache
def sums_ignore_zeros(terms: int) -> bool:
    """Whether a product of so many terms is the same, to the bit, with terms of 0 after them.

    Attention in PyTorch's operators is exact on such machines alone: rollout and training pad keys differently. Some
    versions of MKL divide a sum of more than 384 terms at places that depend on their number.
    """
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(4, *shape, generator=generator) for shape in ((64, terms), (terms, 16)))
    longer = torch.cat([rows, torch.zeros(4, 64, 64)], -1), torch.cat([weight, weight[:, :64]], -2)
    return torch.equal(torch.matmul(rows, weight), torch.matmul(*longer))
