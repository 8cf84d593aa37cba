"""Random ragged batches and steps for comparisons: packed, with multi-turn masks, and their padded forms."""

import dataclasses
import itertools
import random

import numpy
import torch
from torch import Tensor

CASES = 120  # cases of every comparison
FEW = 60  # of a property that all cases have alike; kinds of scores take turns


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


def ragged_batch(seed: int, most: int = 6) -> RaggedBatch:
    """A batch of 1 to `most` sequences of 1 to 20 tokens with at least 3 response tokens in all."""
    draw = random.Random(seed)
    while True:
        lengths = [draw.randint(1, 20) for _ in range(draw.randint(1, most))]
        mask = [flag for length in lengths for flag in _turns(draw, length)]
        if sum(mask) >= 3:
            return RaggedBatch(lengths, torch.tensor(mask), torch.Generator().manual_seed(seed))


def ragged_batches() -> list[RaggedBatch]:
    """`CASES` batches, the same at every call."""
    return [ragged_batch(seed) for seed in range(CASES)]


@dataclasses.dataclass
class RaggedStep:
    """A step: a ragged batch with the prompt and the score of each of its N responses."""

    batch: RaggedBatch
    kind: str  # of the scores: noise, verdicts, extreme, equal
    groups: Tensor  # [N] int64, sizes and order at random, some numbers unused
    scores: Tensor  # [N] float64

    @property
    def labels(self) -> numpy.ndarray:
        """[N] the groups as names, which is how verl has them."""
        return numpy.array([f"prompt {group}" for group in self.groups.tolist()], dtype=object)

    @property
    def sizes(self) -> Tensor:
        """[N] int64, how large each response's group is."""
        return (self.groups[:, None] == self.groups).sum(1)


def ragged_step(seed: int, lone: bool) -> RaggedStep:
    """A step of up to 16 responses; with `lone` some groups have one, else none (which takes two responses)."""
    batch, draw = ragged_batch(seed, most=16), random.Random(f"groups {seed}")
    number = len(batch.lengths)
    if lone:
        groups = [draw.randrange(number) for _ in range(number)]
    else:
        names = draw.sample(range(number), draw.randint(1, number // 2))
        groups = names * 2 + [draw.choice(names) for _ in range(number - 2 * len(names))]
        draw.shuffle(groups)
    kind = ("noise", "verdicts", "extreme", "equal")[seed % 4]
    noise = [draw.gauss(0, 1) for _ in range(number)]
    scores = {
        "noise": noise,
        "verdicts": [float(x > 0) for x in noise],
        "extreme": [x * 10.0 ** draw.randint(-6, 6) for x in noise],
        "equal": [0.1 * group for group in groups],  # not exact in binary: means of them are rounded
    }[kind]
    return RaggedStep(batch, kind, torch.tensor(groups), torch.tensor(scores, dtype=torch.float64))


def ragged_steps(lone: bool, count: int = CASES) -> list[RaggedStep]:
    """That many steps, the same at every call; without `lone` those of one response are left out of the count."""
    seeds = (seed for seed in itertools.count() if lone or len(ragged_batch(seed, most=16).lengths) > 1)
    return [ragged_step(seed, lone) for seed in itertools.islice(seeds, count)]


def _turns(draw: random.Random, length: int) -> list[bool]:
    """Prompt, then response and observation spans alternating, cut at `length`; the first token is never a response."""
    flags, is_response = [False], False
    while len(flags) < length:
        flags += [is_response] * draw.randint(1, 6)
        is_response = not is_response
    return flags[:length]
