"""Metrics of distillation, and with several teachers those of each teacher's tokens."""

import torch
from torch import Tensor

from megarl.arguments import Settings
from megarl.batch import Batch

DISTILL_NAMES = (
    "distill/divergence", "distill/forward_kl", "distill/reverse_kl", "distill/top1_agreement", "teacher/logprob"
)  # fmt: skip


def measured_apart(settings: Settings) -> tuple[str, ...]:
    """The teachers that have metrics of their own: those of `--teachers`, if they are several."""
    names = settings.teacher_names
    return names if len(names) > 1 else ()


def names_by_teacher(names: tuple[str, ...], teachers: tuple[str, ...]) -> tuple[str, ...]:
    """`distill/divergence/math` and so on: all names of the first teacher, then of the next."""
    return tuple(f"{name}/{teacher}" for teacher in teachers for name in names)


def masks_by_teacher(batch: Batch, mask: Tensor, teachers: tuple[str, ...]) -> list[Tensor]:
    """[T] bool for each teacher: the tokens of `mask` [T] whose teacher it is."""
    if not teachers:
        return []
    of_tokens = batch.teacher_ids.repeat_interleave(batch.lengths, output_size=len(mask))
    return [mask & (of_tokens == number) for number in range(len(teachers))]


def token_counts(batch: Batch, mask: Tensor, teachers: tuple[str, ...]) -> Tensor:
    """[K] float64: the tokens of `mask` of each of K teachers."""
    counts = [of_teacher.sum() for of_teacher in masks_by_teacher(batch, mask, teachers)]
    return torch.stack(counts).double() if counts else torch.zeros(0, dtype=torch.float64, device=mask.device)
