"""Groups: which sequences of a step or a round are the responses to one prompt.

Sequences are numbered in the order of the prompts, so those of a group have adjacent ids. Files of a mixture may ask
for groups of their own sizes; every rank that needs the sizes knows all of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megarl.batch import expand_ranges


class PromptGroups:
    """The sizes of G groups with N sequences in total. Tensors are int64, on the host where nothing else is said."""

    def __init__(self, sizes: Sequence[int]):
        """`sizes`: responses to each prompt, at least 1."""
        self.sizes = torch.tensor(sizes, dtype=torch.int64)
        self._ends = self.sizes.cumsum(0)
        self.count = int(self.sizes.sum())  # N
        # The common size, by which a group is found without a copy to the device; None: there is none.
        self._size = sizes[0] if len({*sizes}) == 1 else None

    @classmethod
    def equal(cls, groups: int, size: int) -> "PromptGroups":
        """Groups of one size."""
        return cls([size] * groups)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def starts(self) -> Tensor:
        """[G] id of each group's first sequence."""
        return self._ends - self.sizes

    def of(self, ids: Tensor) -> Tensor:
        """The group of each of these sequences, on their device."""
        if self._size is not None:
            return ids // self._size
        return torch.searchsorted(self._ends.to(ids.device), ids, right=True)

    def ids_of(self, groups: Tensor) -> Tensor:
        """The ids of all sequences of these groups."""
        return expand_ranges(self.starts[groups], self.sizes[groups])

    def kept(self, is_kept: Tensor) -> "PromptGroups":
        """The groups that `is_kept` [G] bool selects."""
        return PromptGroups(self.sizes[is_kept].tolist())

    def expand(self, values: Tensor) -> Tensor:
        """[N] the value of each sequence's group; `values`: [G]."""
        return values.repeat_interleave(self.sizes)

    def reduce(self, values: Tensor, how: str) -> Tensor:
        """[G] the "sum", "amax" or "amin" of each group's `values` [N]."""
        found = values.new_zeros(len(self))
        return found.scatter_reduce(0, self.of(torch.arange(self.count)), values, how, include_self=False)

    def padded(self, values: Tensor) -> Tensor:
        """[G, n, …] the `values` [N, …] of each group, with zeros in groups of fewer than n sequences."""
        if self._size is not None:
            return values.view(len(self), self._size, *values.shape[1:])
        found = values.new_zeros(len(self), int(self.sizes.max()), *values.shape[1:])
        ids = torch.arange(self.count)
        found[self.of(ids), ids - self.expand(self.starts)] = values
        return found

    def round_robin(self, replicas: int) -> Tensor:
        """[N] dp rank of each sequence: prompts are assigned round-robin, all samples of a prompt to one replica."""
        return self.expand(torch.arange(len(self)) % replicas)
