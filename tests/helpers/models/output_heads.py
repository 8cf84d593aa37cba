"""A small output head: hidden states, a padded vocabulary, targets, temperatures of single tokens."""

import torch

from megarl.mcore.kernels import head

T, H, V, PADDED = 20, 12, 21, 32
PER_TOKEN = torch.linspace(0.4, 2.0, T)


def problem(dtype=torch.float32):
    """hidden [T, H], weight [PADDED, H] and targets [T] below the true vocabulary, with edges of the shares."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator).to(dtype)
    weight = torch.randn(PADDED, H, generator=generator).to(dtype)
    targets = torch.randint(0, V, (T,), generator=generator)
    targets[:5] = torch.tensor([0, 7, 8, 16, V - 1])
    return hidden, weight, targets


def cut_chunks(rows: int, columns: int):
    """In a forked rank alone: chunks of at most `rows` tokens."""
    head.MIN_CHUNK = head.MAX_CHUNK = rows * columns


def weighted(scores, used=(1.0, 0.7, -3.0)):
    """One number from the scores: each token and each score counts differently; None leaves a score out."""
    row = torch.linspace(-1, 2, len(scores[0]), dtype=scores[0].dtype)
    return sum((c * row.roll(i) * score).sum() for i, (c, score) in enumerate(zip(used, scores, strict=True)) if c)


def use_row_kernels(rank=0) -> bool:
    """Makes this process compute as on CUDA, with Triton's interpreter, without a softcap and other than in float64."""
    is_so = property(lambda one: one.options.softcap is None and one.hidden.dtype is not torch.float64)
    head.Head.has_row_kernels = is_so
    return True
