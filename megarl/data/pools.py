"""Difficulty pools: how often a prompt is drawn depends on how its latest group of responses did.

Each prompt has the share of correct responses in its latest group, and its number of hard groups in a row. In an epoch
a prompt of a pool with weight w is drawn with chance w / the largest weight; the random number is of the seed, epoch
and prompt. So what is drawn depends on the seed and on the groups so far, and on nothing else.
"""

import numpy as np

from megarl.errors import UsageError


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
