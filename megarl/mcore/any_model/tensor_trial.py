"""Whether a module that is split over ranks computes what it computes whole: tried in one process before work starts.

A plan of transformers says how weights are split. It does not say that a part takes a mean over a split axis, or that a
whole weight, as the norm of single heads, gets a part of its gradient on each rank. A small model is run as each of
the ranks, one after the other. What ranks would sum has the values of the whole model, so that no rank waits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.mcore.any_model import self_check, source, tensor_parallel
from megarl.mcore.any_model.attention import Unsupported
from megarl.mcore.any_model.chunk import LogitInputs
from megarl.mcore.any_model.source import Source
from megarl.mcore.any_model.tensor_parallel import Ranks, starred

TOKENS = 12


class Trial(Ranks):
    """One of so many ranks; the values of what they would send each other are known."""

    def __init__(self, rank: int, size: int, sums: Sequence[Tensor] = ()):
        """`sums`: of all ranks, in the order of a pass; empty: those of this rank."""
        self.rank, self.size, self.sums = rank, size, sums
        self.parts: list[Tensor] = []  # of the sums, by this rank
        self.whole: list[Tensor] = []  # the sums that the module was given

    def to_all(self, x: Tensor) -> Tensor:
        """x, whose gradient needs no sum any more."""
        return x.detach()

    def summed(self, x: Tensor) -> Tensor:
        """The known sum."""
        self.parts.append(x)
        self.whole.append((self.sums[len(self.whole)] if self.sums else x).detach().requires_grad_())
        return self.whole[-1].clone()

    def gathered(self, x: Tensor) -> Tensor:
        """As of `summed`: each rank has zeros in the columns of others."""
        width = x.shape[-1]
        return self.summed(pad(x, (self.rank * width, (self.size - 1 - self.rank) * width)))

    def own_columns(self, x: Tensor) -> Tensor:
        """This rank's columns."""
        return x.detach().chunk(self.size, -1)[self.rank]


def partial_weights(found: Source, ranks: int) -> tuple[str, ...]:
    """Names, with * for numbers, of whole weights that get a part of their gradient on each of so many ranks.

    Raises:
        Unsupported: a module that is split computes something else, or a gradient that no function of its plan sums.
    """
    small = self_check.shortened(found, TOKENS, ranks)
    whole, names = [each.detach() for each in _run(small, Trial(0, 1)).parts], dict[str, None]()
    sums = [torch.zeros_like(each) for each in whole]
    for rank in range(ranks):
        trial = _run(small, Trial(rank, ranks, whole), names)
        for total, part in zip(sums, trial.parts, strict=True):
            total += part.detach()
    for total, each in zip(sums, whole, strict=True):
        difference, largest = float((total - each).abs().max()), max(1.0, float(each.abs().max()))
        if not difference <= self_check.TOLERANCE * largest:
            raise Unsupported(
                f"{found.kind.__name__} computes something else in parts (off by {difference:.1g}, the largest is "
                f"{largest:.1g}): its plan splits what a part of it needs whole"
            )
    return tuple(names)


def _run(found: Source, trial: Trial, partial: dict[str, None] | None = None) -> Trial:
    """A pass as one rank. Adds the names of weights that the rank's parts of sums depend on to `partial`."""
    module = found.module(torch.float32)
    shapes: dict[str, Any] = {name: each.shape for name, each in module.named_parameters(remove_duplicate=False)}
    splits = tensor_parallel.splits_of(module, trial.size)
    tensor_parallel.split(module, splits, trial)

    def values(name: str, _, dtype: torch.dtype) -> Tensor:
        whole = source.spread_values(name, shapes[name.removeprefix(".")], dtype)
        return splits[name].of(whole, trial.rank, trial.size) if name in splits else whole

    known, trial.sums = trial.sums, ()
    with source.one_line_errors(found.kind, f"run on {trial.size} tensor-parallel ranks"):
        source.find_slots(module)
        trial.sums, trial.parts, trial.whole = known, [], []
        with source.values_in(module, values):
            weights = dict(module.named_parameters(remove_duplicate=False))
            for each in weights.values():
                each.requires_grad_(each.is_floating_point())
            tokens = torch.randint(found.text.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(0))
            self_check.logits(module, LogitInputs(module), tokens, [TOKENS])
            torch.stack([part.sum() for part in trial.parts if part.requires_grad]).sum().backward()
    if any(_has_gradient(each) for each in trial.whole):
        raise Unsupported(f"the plan of {found.kind.__name__} does not sum the gradient of what its ranks share")
    if partial is not None:
        own = (name for name, each in weights.items() if name not in splits and _has_gradient(each))
        partial.update(dict.fromkeys(map(starred, own)))
    return trial


def _has_gradient(x: Tensor) -> bool:
    return x.grad is not None and bool(x.grad.any())
