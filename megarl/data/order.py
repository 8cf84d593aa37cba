"""The order in which prompts are drawn: infinite, reshuffled every epoch, resumable from one number."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.errors import UsageError

_SEED_LIMIT = 2**64


class PromptOrder:
    """Maps a position to a prompt index as a pure function of (size, seed), so the position is the whole state.

    Epoch e's permutation sorts the raw output of a counter-based generator (Philox, Salmon et al. 2011) keyed by
    (seed, e). Raw generator output is the same on every machine and in every numpy version; numpy's own `permutation`
    promises neither.
    """

    def __init__(self, size: int, seed: int, stream: int = 0):
        """`stream`: of several orders with one seed, each has another."""
        if size < 1:
            raise ValueError(f"size {size}: must be at least 1")
        if not 0 <= seed < _SEED_LIMIT:
            raise UsageError(f"--seed {seed}: must be from 0 to 2^64 - 1")
        self.size = size
        self.seed, self._first_key = seed, stream << 32
        self.position = 0
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def indices(self, start: int, count: int) -> list[int]:
        """The prompt indices at positions `start` to `start + count - 1`, across epochs."""
        if start < 0 or count < 0:
            raise ValueError(f"start {start} and count {count} must not be negative")
        taken: list[int] = []
        while len(taken) < count:
            epoch, offset = divmod(start + len(taken), self.size)
            taken.extend(self._epoch_permutation(epoch)[offset : offset + count - len(taken)].tolist())
        return taken

    def take(self, count: int) -> list[int]:
        """The next `count` prompt indices; advances the position."""
        taken = self.indices(self.position, count)
        self.position += count
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved position; UsageError if it was saved for another number of prompts."""
        if state["size"] != self.size:
            raise UsageError(
                f"--prompts: the file has {self.size} prompts, the checkpoint was written with {state['size']}; "
                "resume with the same file"
            )
        _check_counts(state, 1)
        self.position = state["position"]

    def _epoch_permutation(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            generator = np.random.Philox(key=np.array([self.seed, self._first_key + epoch], np.uint64))
            self._permutation = np.argsort(generator.random_raw(self.size), kind="stable")
            self._epoch = epoch
        return self._permutation


class MixtureOrder:
    """Draws from several sources in turn, each in its own `PromptOrder`.

    The next source is the one that is furthest behind its share of the draws so far, the first of equal ones. In any
    number of draws that the sum of the weights divides, each source has exactly its share; between, no source is a draw
    or more ahead of its share.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[int], seed: int):
        """`sizes`: prompts of each source, which follow each other in the set; `weights`: whole numbers above 0."""
        self.size, self.weights = sum(sizes), list(weights)
        self._orders = [PromptOrder(size, seed, stream) for stream, size in enumerate(sizes)]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]

    @property
    def counts(self) -> list[int]:
        """Draws of each source so far."""
        return [order.position for order in self._orders]

    def take(self, count: int) -> list[int]:
        """The next `count` prompt indices; advances the position."""
        return [self._next() for _ in range(count)]

    def _next(self) -> int:
        drawn, total = sum(self.counts) + 1, sum(self.weights)
        behind = [weight * drawn - count * total for weight, count in zip(self.weights, self.counts, strict=True)]
        source = behind.index(max(behind))
        return self._starts[source] + self._orders[source].take(1)[0]

    def state_dict(self) -> dict[str, Any]:
        return {"position": sum(self.counts), "size": self.size, "counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As of `PromptOrder`."""
        _check_counts(state, len(self._orders))
        for order, count in zip(self._orders, state["counts"], strict=True):
            order.position = count


def _check_counts(state: dict[str, Any], sources: int):
    """UsageError if a state is not one of an order of that many sources."""
    counts = state.get("counts", [state["position"]])
    is_list = isinstance(counts, list) and all(type(count) is int and count >= 0 for count in counts)
    if not is_list or len(counts) != sources or sum(counts) != state["position"]:
        raise UsageError("--load: the checkpoint was written with another mixture of --prompts, or is damaged")
