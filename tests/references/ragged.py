"""Random ragged batches for comparisons: packed, with multi-turn masks, and their padded twins."""

import dataclasses
import random

import torch
from torch import Tensor

CASES = 250  # cases of every comparison


@dataclasses.dataclass
class RaggedBatch:
    """A packed batch of N sequences; `mask` has several response spans a sequence, some sequences have none."""

    lengths: list[int]
    mask: Tensor  # [T] bool
    generator: torch.Generator

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0)

    def normal(self, scale: float = 1.0) -> Tensor:
        """[T] float64 noise."""
        return scale * torch.randn(sum(self.lengths), generator=self.generator, dtype=torch.float64)

    def padded(self, field: Tensor) -> Tensor:
        """[T] -> [N, longest], zeros (False) on the right."""
        return torch.nn.utils.rnn.pad_sequence(field.split(self.lengths), batch_first=True)

    def packed(self, matrix: Tensor) -> Tensor:
        """[N, longest] -> [T]."""
        return torch.cat([row[:length] for row, length in zip(matrix, self.lengths)])


def ragged_batch(seed: int) -> RaggedBatch:
    """A batch of 1 to 6 sequences of 1 to 20 tokens with at least 3 response tokens in all."""
    draw = random.Random(seed)
    while True:
        lengths = [draw.randint(1, 20) for _ in range(draw.randint(1, 6))]
        mask = [flag for length in lengths for flag in _turns(draw, length)]
        if sum(mask) >= 3:
            return RaggedBatch(lengths, torch.tensor(mask), torch.Generator().manual_seed(seed))


def ragged_batches() -> list[RaggedBatch]:
    """`CASES` batches, the same at every call."""
    return [ragged_batch(seed) for seed in range(CASES)]


def _turns(draw: random.Random, length: int) -> list[bool]:
    """Prompt, then response and observation spans in turn, cut at `length`; the first token is never a response."""
    flags, is_response = [False], False
    while len(flags) < length:
        flags += [is_response] * draw.randint(1, 6)
        is_response = not is_response
    return flags[:length]
