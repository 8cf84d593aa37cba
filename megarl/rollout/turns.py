"""Requests of a step that is handed over in chunks: those of an early chunk are written before those of a later one."""

import bisect

import torch

from megarl.batch import lane_of
from megarl.mcore.engine import Listed, Request
from megarl.rollout.dispatch import Shared
from megarl.world import Place


class InTurn:
    """Sources of a step's chunks, one after the other; a `Source` of the engine. Requests are numbered by step."""

    def __init__(
        self, requests: list[Request], bounds: list[int], place: Place, is_dealt: bool, samples: int, unit: int
    ):
        """
        Args:
            requests: of all lanes, the same on every rank.
            bounds: place behind the last request of each chunk.
            place: of this rank in the rollout.
            is_dealt: whether prompts are dealt to lanes, `samples` requests each; else lanes take `unit` at a time.
        """
        self._starts, lanes = [0, *bounds[:-1]], len(place.lanes)
        parts = [requests[start:bound] for start, bound in zip(self._starts, bounds, strict=True)]
        if is_dealt:
            owners = lane_of(torch.arange(len(requests)), lanes, samples).split([len(part) for part in parts])
            mine = [(own == place.lane).nonzero().flatten().tolist() for own in owners]
            self._sources = [Listed((i, part[i]) for i in own) for part, own in zip(parts, mine, strict=True)]
        else:
            self._sources = [Shared(part, unit, place) for part in parts]
        self._shared = [] if is_dealt else self._sources
        # The most that this lane holds at a time, as `Shared.share` of all requests.
        self.most = None if is_dealt else -(-len(requests) // (lanes * unit)) * unit
        self._open: list[set[int]] = [set() for _ in parts]  # of each chunk, what this lane took and has no end

    def take(self, room: int) -> list[tuple[int, Request]]:
        """At most `room` more; of a chunk when all lanes together have taken those before."""
        found = []
        for start, source, held in zip(self._starts, self._sources, self._open, strict=True):
            taken = [(start + i, request) for i, request in source.take(room - len(found))]
            held.update(i for i, _ in taken)
            found += taken
            if not source.is_empty():
                break
        return found

    def is_empty(self) -> bool:
        """Whether all was taken, as far as this lane knows."""
        return all(source.is_empty() for source in self._sources)

    def ended(self, place: int):
        """Hears of a response that has its end."""
        self._open[bisect.bisect_right(self._starts, place) - 1].discard(place)

    def is_over(self, chunk: int) -> bool:
        """Whether this lane has nothing more to write of a chunk."""
        return self._sources[chunk].is_empty() and not self._open[chunk]

    def close(self):
        """Every lane says so, behind its last request."""
        for source in self._shared:
            source.close()
