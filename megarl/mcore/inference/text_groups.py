"""Which requests of an engine have the same text so far: a decode step computes such a text once.

Siblings of a group have the same prompt and draw the same tokens as long as the policy is sure of them. Texts are never
compared: two requests stay in a group while they draw the same tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_GROWTHS, _TOKENS = 64, 1 << 24  # more than the tokens that a text can get in a step, and than a vocabulary has


class Groups(NamedTuple):
    """The n requests of a step in m groups with the same text."""

    first: np.ndarray  # [m] index of a request of each group
    of: np.ndarray  # [n] the group of each request

    @property
    def sizes(self) -> np.ndarray:
        """[m] requests of each group."""
        return np.bincount(self.of, minlength=len(self.first))


class TextGroups:
    """Follows the groups of an engine's requests from step to step."""

    def __init__(self):
        self._group = np.zeros(0, np.int64)  # by request id
        self._length = np.zeros(0, np.int64)  # of the text of that group
        self.reset()

    def reset(self):
        """Begins without requests."""
        self._prompts: dict[tuple[int, ...], int] = {}
        self._unseen: set[int] = set()  # requests that wait for their first step
        self._next, self._are_distinct = 0, False

    def begin(self, request_id: int, prompt: Sequence[int]):
        """Adds a request."""
        if request_id >= len(self._group):
            self._group, self._length = (np.resize(x, 2 * request_id + 64) for x in (self._group, self._length))
        group = self._prompts.setdefault(tuple(prompt), self._next)
        self._next += group == self._next
        self._group[request_id], self._length[request_id] = group, len(prompt)
        self._unseen.add(request_id)
        self._are_distinct = False

    def update(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray, most: int = 1) -> Groups:
        """Returns the groups of a step's requests.

        Args:
            ids: [n] of the requests.
            lengths: [n] of their texts.
            last: [n] their last tokens.
            most: tokens that a text may have got since the last call: as many of the requests of a group are the same
                if as many of their tokens and the last ones are. A request with more gets a group of its own.
        """
        everyone = np.arange(len(ids))
        if self._are_distinct:
            return Groups(everyone, everyone)
        growth = lengths - self._length[ids]
        keys = (self._group[ids] * _GROWTHS + growth) * _TOKENS + np.where(growth == 0, 0, last)
        keys = np.where((growth >= 0) & (growth <= most), keys, -1 - everyone)
        _, first, of = np.unique(keys, return_index=True, return_inverse=True)
        self._group[ids], self._length[ids] = self._next + of, lengths
        self._next += len(first)
        if self._unseen:
            self._unseen.difference_update(ids.tolist())
        self._are_distinct = len(first) == len(ids) and not self._unseen
        return Groups(first, of)
