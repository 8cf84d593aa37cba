"""Whether a module that is split over ranks computes what it computes whole: tried in one process before work starts.

A plan of transformers says how weights are split. It does not say that a part takes a mean over a split axis, or that a
whole weight, as the norm of single heads, gets a part of its gradient on each rank. A small model is run as each of
the ranks, one after the other. What ranks would sum has the values of the whole model, so that no rank waits. What a
rank's part of a sum depends on is found by changes: a backward pass would start threads, and ranks may be forked later.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from megarl.mcore.any_model import self_check, source, tensor_parallel
from megarl.mcore.any_model.attention import Unsupported
from megarl.mcore.any_model.chunk import HeadInputs
from megarl.mcore.any_model.source import Source
from megarl.mcore.any_model.tensor_parallel import Ranks, starred

TOKENS = 12


class Trial(Ranks):
    """A model as one of so many ranks has it, where what they would send each other is known."""

    def __init__(self, found: Source, rank: int, size: int, sums: Sequence[Tensor] = ()):
        """`sums`: of all ranks, in the order of a pass; empty: those of this rank. Raises Unsupported."""
        self.rank, self.size, self._found = rank, size, found
        self._sums: Sequence[Tensor] = ()
        self._parts: list[Tensor] = []  # of the sums, by this rank
        self._inputs: list[Tensor] = []  # of what is split, in the first pass
        self._replayed: Iterator[Tensor] | None = None  # the same, in later ones
        self._shift = 0.0
        self.module = found.module(torch.float32)
        self.shapes = {name: each.shape for name, each in self.module.named_parameters(remove_duplicate=False)}
        self.splits = tensor_parallel.splits_of(self.module, size)
        tensor_parallel.split(self.module, self.splits, self)
        source.find_slots(self.module)
        self._sums, self._inputs = sums, []

    def to_all(self, x: Tensor) -> Tensor:
        """x, or in later passes what it was in the first one."""
        if self._replayed is not None:
            return next(self._replayed)
        self._inputs.append(x)
        return x

    def summed(self, x: Tensor) -> Tensor:
        """The known sum."""
        self._parts.append(x)
        return (self._sums[len(self._parts) - 1] if self._sums else x) + self._shift

    def gathered(self, x: Tensor) -> Tensor:
        """As of `summed`: each rank has zeros in the columns of others."""
        width = x.shape[-1]
        return self.summed(pad(x, (self.rank * width, (self.size - 1 - self.rank) * width)))

    def own_columns(self, x: Tensor) -> Tensor:
        """This rank's columns."""
        return self.to_all(x).chunk(self.size, -1)[self.rank]

    @torch.no_grad()
    def run(self, changed: str = "", shift: float = 0.0) -> list[Tensor]:
        """This rank's parts of all sums. In later passes than the first the inputs of what is split are as there.

        Args:
            changed: whole weights of this name, with * for numbers, are doubled.
            shift: added to each sum that the module gets.
        """
        self._parts, self._shift = [], shift
        self._replayed = iter(self._inputs) if self._inputs else None

        def values(name: str, _, dtype: torch.dtype) -> Tensor:
            whole = source.spread_values(name, self.shapes[name.removeprefix(".")], dtype)
            whole = whole * 2 if starred(name) == changed else whole
            return self.splits[name].of(whole, self.rank, self.size) if name in self.splits else whole

        tokens = torch.randint(self._found.text.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(0))
        with source.values_in(self.module, values):
            self_check.logits(self.module, HeadInputs(self.module), tokens, [TOKENS])
        return self._parts


def partial_weights(found: Source, ranks: int) -> tuple[str, ...]:
    """Names, with * for numbers, of whole weights that get a part of their gradient on each of so many ranks.

    Raises:
        Unsupported: a module that is split computes something else, or a gradient that no function of its plan sums.
    """
    small, kind = self_check.shortened(found, TOKENS, ranks), found.kind.__name__
    with source.one_line_errors(found.kind, f"run on {ranks} tensor-parallel ranks"):
        whole = Trial(small, 0, 1).run()
        trials = [Trial(small, rank, ranks, whole) for rank in range(ranks)]
        for wanted, *parts in zip(whole, *(trial.run() for trial in trials), strict=True):
            difference, largest = float((sum(parts) - wanted).abs().max()), max(1.0, float(wanted.abs().max()))
            if not difference <= self_check.TOLERANCE * largest:
                raise Unsupported(
                    f"{kind} computes something else in parts (off by {difference:.1g}, the largest is {largest:.1g}): "
                    "its plan splits what a part of it needs whole"
                )
        first, own = trials[0], trials[0].run()
        if _differ(first.run(shift=1.0), own):
            raise Unsupported(f"the plan of {kind} does not sum the gradient of what its ranks share")
        names = dict.fromkeys(starred(name) for name in first.shapes if name not in first.splits)
        return tuple(name for name in names if _differ(first.run(changed=name), own))


def _differ(found: list[Tensor], others: list[Tensor]) -> bool:
    return not all(map(torch.equal, found, others))
