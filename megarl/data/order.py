"""The order in which prompts are drawn: infinite, reshuffled every epoch, resumable from one number."""

import numpy as np

from megarl.errors import UsageError

_SEED_LIMIT = 2**64


class PromptOrder:
    """Maps a position to a prompt index as a pure function of (size, seed), so the position is the whole state.

    Epoch e's permutation sorts the raw output of a counter-based generator (Philox, Salmon et al. 2011) keyed by
    (seed, e). Raw generator output is the same on every machine and in every numpy version; numpy's own `permutation`
    promises neither.
    """

    def __init__(self, size: int, seed: int):
        if size < 1:
            raise ValueError(f"size {size}: must be at least 1")
        if not 0 <= seed < _SEED_LIMIT:
            raise UsageError(f"--seed {seed}: must be from 0 to 2^64 - 1")
        self.size = size
        self.seed = seed
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

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "size": self.size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the saved position; UsageError if it was saved for another number of prompts."""
        if state["size"] != self.size:
            raise UsageError(
                f"--prompts: the file has {self.size} prompts, the checkpoint was written with {state['size']}; "
                "resume with the same file"
            )
        self.position = state["position"]

    def _epoch_permutation(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            generator = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64))
            self._permutation = np.argsort(generator.random_raw(self.size), kind="stable")
            self._epoch = epoch
        return self._permutation
