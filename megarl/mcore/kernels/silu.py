"""Batch-invariant SiLU: a token's result does not depend on its position in the batch or the number of threads."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

GRAIN = 32768  # minimum elements per thread in torch's element-wise operations


def silu(x: Tensor) -> Tensor:
    """x · σ(x) of [T, …, W] (arXiv 1702.03118 eq. 9)."""
    return by_whole_rows(functional.silu, x)


def by_whole_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies an element-wise function to [T, …, W] so that threads get whole rows.

    CPU threads get equal shares of the elements. If a share ends inside a row, its last elements do not fill a vector
    and use another exp. So the largest leading block of rows that splits into whole rows is computed separately.
    """
    head = x.shape[0] if x.is_cuda else _shared_rows(x.shape[0], x.numel())
    if head == x.shape[0]:
        return function(x)
    return torch.cat([function(rows) for rows in x.split([head, x.shape[0] - head]) if len(rows)])


def _shared_rows(rows: int, elements: int) -> int:
    """Returns the most of `rows` (with `elements` in total) that threads split into whole rows; all if none do."""
    width, all_rows = elements // max(rows, 1), rows
    while rows and rows % max(1, min(torch.get_num_threads(), -(-rows * width // GRAIN))):
        rows -= 1
    return rows or all_rows
