"""Numbers the items of several lists that follow one another in one tensor."""

import numpy as np
import torch
from torch import Tensor


def expand_counts(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (owner, place) [Σ counts]: for each of counts[i] items of list i, i and the item's number in the list."""
    owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return owner, torch.arange(len(owner)) - (counts.cumsum(0) - counts)[owner]


def expand_array_counts(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Same as `expand_counts`, for arrays. No operation of torch, so a mode that watches torch sees none."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]
