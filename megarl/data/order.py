"""The order in which prompts are drawn: infinite, reshuffled every epoch, resumable from one number.

With difficulty pools, how often a prompt is drawn depends on how its latest group of responses did. Each prompt has the
share of correct responses in that group, and its number of hard groups in a row. In an epoch a prompt of a pool with
weight w is drawn with chance w / the largest weight; the random number is of the seed, epoch and prompt. So what is
drawn depends on the seed and on the groups so far, and on nothing else.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.errors import RunStopped, UsageError

_SEED_LIMIT = 2**64
_CHANCES = 1 << 63  # numbers of the generator that decide which prompts an epoch leaves out
_LOOKED_AT = 1024  # prompts at once, for the next one that is drawn
NOTHING_LEFT = "--pool-weights, --pool-retire-after: no prompt is left to draw; all are in pools that are left out"


# -- difficulty pools --------------------------------------------------------------------------------------------------


class DifficultyPools:
    """The pools of a set of prompts. A prompt without a group is normal."""

    def __init__(
        self, size: int, bounds: tuple[float, float], weights: tuple[float, float, float], retire_after: int = 0
    ):
        """`bounds`: shares of correct responses up to which a prompt is hard, and from which on it is easy; `weights`:
        of hard, normal and easy prompts, at most 1; `retire_after`: hard groups in a row; 0: never."""
        self._bounds, self._weights, self._retire_after = bounds, np.array(weights), retire_after
        self.latest = np.full(size, np.nan)  # share of correct responses; NaN: no group so far
        self.hard_in_a_row = np.zeros(size, np.int64)
        self.chances = np.full(size, float(weights[1]))  # of each prompt, to be drawn in an epoch
        self._waiting: list[tuple[int, float]] = []

    def add(self, line: int, share: float):
        """Adds a group; `share`: of its responses that are correct, NaN if none of them counts. It has its effect with
        `end_step`."""
        if not np.isnan(share):
            self._waiting.append((line, share))

    def end_step(self):
        """Moves the prompts of the step's groups, in their order, to their pools."""
        for line, share in self._waiting:
            self.latest[line] = share
            self.hard_in_a_row[line] = self.hard_in_a_row[line] + 1 if share <= self._bounds[0] else 0
        self._set_chances(np.unique([line for line, _ in self._waiting]).astype(np.int64))
        self._waiting = []

    def _set_chances(self, lines: np.ndarray):
        self.chances[lines] = np.where(self._are_retired(lines), 0.0, self._weights[self._pools(lines)])

    def _pools(self, lines: np.ndarray) -> np.ndarray:
        latest = self.latest[lines]  # comparisons with NaN are false
        return 1 - (latest <= self._bounds[0]) + (latest >= self._bounds[1])

    def _are_retired(self, lines: np.ndarray) -> np.ndarray:
        return (self._retire_after > 0) & (self.hard_in_a_row[lines] >= self._retire_after)

    def metrics(self) -> dict[str, float]:
        """Share of the prompts in each pool, of those that are retired and of those without a group."""
        lines = np.arange(len(self.latest))
        retired, pools = self._are_retired(lines), self._pools(lines)
        hard, normal, easy = (int(((pools == number) & ~retired).sum()) for number in range(3))
        return {
            "pools/hard_fraction": hard / len(lines),
            "pools/normal_fraction": normal / len(lines),
            "pools/easy_fraction": easy / len(lines),
            "pools/retired_fraction": int(retired.sum()) / len(lines),
            "pools/unseen_fraction": int(np.isnan(self.latest).sum()) / len(lines),
        }

    def state_dict(self) -> dict[str, np.ndarray]:
        """What a checkpoint holds, after `end_step`."""
        return {"latest": self.latest, "hard_in_a_row": self.hard_in_a_row}

    def load_state_dict(self, state: dict[str, np.ndarray], where: str):
        """Restores the state of `state_dict`, also of other bounds and weights. UsageError, which begins with `where`,
        for anything else."""
        latest, rows = state["latest"], state["hard_in_a_row"]
        is_right = latest.shape == rows.shape == self.latest.shape and latest.dtype == self.latest.dtype
        is_right = is_right and rows.dtype == self.hard_in_a_row.dtype and (rows >= 0).all()
        if not is_right or not (np.isnan(latest) | (latest >= 0) & (latest <= 1)).all():
            raise UsageError(f"{where}: has the pools of other prompts, or is damaged")
        self.latest, self.hard_in_a_row = latest.copy(), rows.copy()
        self._set_chances(np.arange(len(latest)))


# -- orders ------------------------------------------------------------------------------------------------------------


class PromptOrder:
    """Maps a position to a prompt index as a pure function of (size, seed), so the position is the whole state.

    Epoch e's permutation sorts the raw output of a counter-based generator (Philox, Salmon et al. 2011) keyed by
    (seed, e). Raw generator output is the same on every machine and in every numpy version; numpy's own `permutation`
    promises neither.
    """

    def __init__(self, size: int, seed: int, stream: int = 0, chances: np.ndarray | None = None):
        """`stream`: of several orders with one seed, each has another. `chances`: [size] of `DifficultyPools`; a prompt
        that an epoch leaves out takes a position, too."""
        if not 0 <= seed < _SEED_LIMIT:
            raise UsageError(f"--seed {seed}: must be from 0 to 2^64 - 1")
        self.size = size
        self.seed, self._first_key = seed, stream << 32
        self.position = 0
        self._chances = chances
        self._drawn: tuple[int, np.ndarray] = -1, np.empty(0)  # an epoch, and its random numbers
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def indices(self, start: int, count: int) -> list[int]:
        """The prompt indices at positions `start` to `start + count - 1`, across epochs."""
        taken: list[int] = []
        while len(taken) < count:
            epoch, offset = divmod(start + len(taken), self.size)
            taken.extend(self._epoch_permutation(epoch)[offset : offset + count - len(taken)].tolist())
        return taken

    def take(self, count: int) -> list[int]:
        """The next `count` prompt indices; advances the position. RunStopped if every prompt is left out."""
        if self._chances is not None:
            return [self._next_of_pools() for _ in range(count)]
        taken = self.indices(self.position, count)
        self.position += count
        return taken

    @property
    def has_prompts(self) -> bool:
        """Whether there is a prompt to draw."""
        return self._chances is None or bool(self._chances.any())

    def _next_of_pools(self) -> int:
        if not self.has_prompts:
            raise RunStopped(NOTHING_LEFT)
        while True:
            epoch, offset = divmod(self.position, self.size)
            indices = self._epoch_permutation(epoch)[offset : offset + _LOOKED_AT]
            is_drawn = self._random_numbers(epoch)[indices] < self._chances[indices]
            if is_drawn.any():
                found = int(is_drawn.argmax())
                self.position += found + 1
                return int(indices[found])
            self.position += len(indices)

    def _random_numbers(self, epoch: int) -> np.ndarray:
        """[size] float64 in [0, 1): a number of each prompt in an epoch."""
        if self._drawn[0] != epoch:
            raw = self._raw(_CHANCES | epoch)
            self._drawn = epoch, (raw >> np.uint64(11)) * 2.0**-53
        return self._drawn[1]

    def _raw(self, number: int) -> np.ndarray:
        """[size] raw output of the generator with this number of the seed."""
        key = np.array([self.seed, self._first_key | number], np.uint64)
        return np.random.Philox(key=key).random_raw(self.size)

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
            self._permutation = np.argsort(self._raw(epoch), kind="stable")
            self._epoch = epoch
        return self._permutation


class MixtureOrder:
    """Draws from several sources in turn, each in its own `PromptOrder`.

    The next source is the one that is furthest behind its share of the draws so far, the first of equal ones. In any
    number of draws that the sum of the weights divides, each source has exactly its share; between, no source is a draw
    or more ahead of its share. A source whose prompts pools have all left out is passed over: the others keep the
    proportions of their weights, and it does not catch up when it has prompts again.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[int], seed: int, pools: DifficultyPools | None = None):
        """`sizes`: prompts of each source, which follow each other in the set; `weights`: whole numbers above 0."""
        self.size, self.weights = sum(sizes), list(weights)
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        # Parts of the pools' chances, which change with them.
        parts = [None if pools is None else pools.chances[i : i + n] for i, n in zip(self._starts, sizes, strict=True)]
        self._orders = [PromptOrder(n, seed, i, part) for i, (n, part) in enumerate(zip(sizes, parts, strict=True))]
        self.counts = [0] * len(sizes)  # draws of each source so far
        self._turns = [0] * len(sizes)  # the same, with those for which it was passed over

    def take(self, count: int) -> list[int]:
        """The next `count` prompt indices; advances the position. RunStopped if every prompt is left out."""
        sources = [number for number, order in enumerate(self._orders) if order.has_prompts]
        if not sources:
            raise RunStopped(NOTHING_LEFT)
        taken = [self._next(sources) for _ in range(count)]
        turns, total = self._turns_of(sources)
        for number in set(range(len(self._orders))).difference(sources):
            self._turns[number] = max(self._turns[number], self.weights[number] * turns // total)
        return taken

    def _next(self, sources: Sequence[int]) -> int:
        turns, total = self._turns_of(sources)
        source = max(sources, key=lambda number: self.weights[number] * (turns + 1) - self._turns[number] * total)
        self.counts[source] += 1
        self._turns[source] += 1
        return self._starts[source] + self._orders[source].take(1)[0]

    def _turns_of(self, sources: Sequence[int]) -> tuple[int, int]:
        return sum(self._turns[number] for number in sources), sum(self.weights[number] for number in sources)

    def state_dict(self) -> dict[str, Any]:
        positions = [order.position for order in self._orders]
        counts, turns = [*self.counts], [*self._turns]
        return {"position": sum(counts), "size": self.size, "counts": counts, "turns": turns, "positions": positions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As of `PromptOrder`."""
        _check_counts(state, len(self._orders))
        self.counts = [*state["counts"]]
        self._turns = [*state["turns"]]
        for order, position in zip(self._orders, state["positions"], strict=True):
            order.position = position


def _check_counts(state: dict[str, Any], sources: int):
    counts, positions = (state.get(name, [state["position"]]) for name in ("counts", "positions"))
    are_right = all(
        isinstance(numbers, list) and len(numbers) == sources and all(type(n) is int and n >= 0 for n in numbers)
        for numbers in (counts, positions, state.get("turns", counts))
    )
    if not are_right or sum(counts) != state["position"]:
        raise UsageError("--load: the checkpoint was written with another mixture of --prompts, or is damaged")
