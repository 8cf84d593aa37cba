"""Which requests of an engine have the same sequence so far: a decode step computes such a sequence once.

Siblings of a group have the same prompt and draw the same tokens as long as the policy is sure of them. Sequences are
never compared: two requests stay in a group while they draw the same tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Groups(NamedTuple):
    """The n requests of a step in m groups with the same sequence."""

    first: np.ndarray  # [m] index of a request of each group
    of: np.ndarray  # [n] the group of each request

    @classmethod
    def apart(cls, count: int) -> "Groups":
        """Each request in a group of its own."""
        return cls(np.arange(count), np.arange(count))

    @property
    def sizes(self) -> np.ndarray:
        """[m] requests of each group."""
        return np.bincount(self.of, minlength=len(self.first))


class SequenceGroups:
    """Follows the groups of an engine's requests from step to step."""

    def __init__(self):
        self.reset()

    def reset(self):
        self._prompts: dict[tuple[int, ...], int] = {}
        self._known: dict[int, tuple[int, int]] = {}  # request -> its group, and the length of that group's sequence
        self._unseen: set[int] = set()  # requests that wait for their first step
        self._next, self._are_apart = 0, True

    def begin(self, request_id: int, prompt: Sequence[int]):
        group = self._prompts.setdefault(tuple(prompt), self._next)
        self._next += group == self._next
        self._known[request_id] = group, len(prompt)
        self._unseen.add(request_id)

    @property
    def are_apart(self) -> bool:
        """Whether no requests of the next step have the same sequence, known without `update`."""
        return self._are_apart and not self._unseen

    def update(self, ids: Sequence[int], lengths: Sequence[int], last: Sequence[int], max_growth: int = 1) -> Groups:
        """Returns the groups of a step's requests [n]. `lengths`, `last`: [n] of their sequences, and their last
        tokens; `max_growth`: tokens that a sequence may have got since the last call: as many of the requests of a
        group are the same if as many of their tokens and the last ones are. One with more gets a group of its own."""
        found, first, of = {}, [], []
        for i, (request, length, token) in enumerate(zip(ids, lengths, last, strict=True)):
            group, before = self._known[request]
            growth = length - before
            key = (group, growth, token if growth else 0) if 0 <= growth <= max_growth else i
            number = found.setdefault(key, len(first))
            if number == len(first):
                first.append(i)
            of.append(number)
            self._known[request] = self._next + number, length
        self._next += len(first)
        if self._unseen:
            self._unseen.difference_update(ids)
        self._are_apart = len(first) == len(ids)
        return Groups(np.array(first), np.array(of))
