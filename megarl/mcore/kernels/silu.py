"""SiLU whose numbers of a token do not depend on where the token stands, with any number of threads."""

import torch
from torch import Tensor
from torch.nn import functional

GRAIN = 32768  # numbers of which torch gives each thread at least as many in element-wise work


def silu(x: Tensor) -> Tensor:
    """x · σ(x) of [T, …, W] (arXiv 1702.03118 eq. 9).

    A CPU's threads take equal shares of all numbers. Where a share ends inside a row, the last of its numbers are no
    whole vector, and take another exp. So the first rows, as many as make shares of whole rows, go alone.
    """
    head = x.shape[0] if x.is_cuda else _shared_rows(x.shape[0], x.numel())
    if head == x.shape[0]:
        return functional.silu(x)
    return torch.cat([functional.silu(part) for part in x.split([head, x.shape[0] - head]) if len(part)])


def _shared_rows(rows: int, numbers: int) -> int:
    """The most rows, of `rows` with so many numbers together, that threads share out whole; all where none can be."""
    width, most = numbers // max(rows, 1), rows
    while rows and rows % max(1, min(torch.get_num_threads(), -(-rows * width // GRAIN))):
        rows -= 1
    return rows or most
