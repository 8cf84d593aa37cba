"""What the rollout's lanes tell each other while they write: who takes the next requests, and when enough is written.

Lengths of responses are not known before, so lanes that were dealt the same number of requests end at different times.
The text does not depend on who writes it: each request has its own random stream.
"""

import array
import itertools
from collections import Counter, deque
from collections.abc import Iterable

import torch
import torch.distributed as dist

from megarl.comm.role_mesh import RoleGroups
from megarl.mcore import device
from megarl.mcore.inference.engine import Completion, GenerationRequest

UNFINISHED = 1 << 40  # tokens of a response without an end
_calls = itertools.count()  # of this process; ranks of one rollout make the same calls in the same order


class StoreCounter:
    """One entry in the store by which the ranks met, for one call of the rollout; the lanes' first ranks use it."""

    def __init__(self, role_groups: RoleGroups):
        self.role_groups = role_groups
        self.store, self.key = dist.distributed_c10d._get_default_store(), f"megarl/rollout/{next(_calls)}"

    def broadcast_in_replica(self, number: int) -> int:
        """The number of the lane's first rank, on all of its ranks. A collective of the lane."""
        ranks = self.role_groups.replica
        if len(ranks) == 1:
            return number
        shared = torch.tensor([number], dtype=torch.int64, device=device.device())
        dist.broadcast(shared, ranks[0], group=self.role_groups.replica_group)
        return int(shared)

    def close(self):
        """Takes the entry away, once every lane is done with it."""
        if self.role_groups.is_leader and self.store.add(f"{self.key}/done", 1) == len(self.role_groups.replicas):
            self.store.delete_key(self.key)
            self.store.delete_key(f"{self.key}/done")


class SharedRequestQueue:
    """The requests of all lanes in one order, longest first. A `RequestSource` of the engine, one object on each rank.

    Lanes draw places in the order from a counter: one addition, no waiting. A lane's first rank draws for all of them.
    """

    def __init__(self, requests: list[GenerationRequest], unit: int, role_groups: RoleGroups):
        """
        Args:
            requests: all of them, the same on every rank; those with nothing left to write are passed over.
            unit: so many that follow each other go to one lane: a prompt's samples where they share its cache.
            role_groups: of this rank in the rollout.
        """
        self.requests, self.unit, self.board = requests, unit, StoreCounter(role_groups)
        units = (
            _unfinished(requests, range(len(requests))[first : first + unit]) for first in range(0, len(requests), unit)
        )
        self._order = sorted(filter(None, units), key=lambda mine: (-max(len(requests[i].prompt) for i in mine), mine))
        self._mine: deque[int] = deque()  # drawn and not yet taken
        self._is_drawn = not self._order

    @property
    def share(self) -> int:
        """Requests that a lane begins at most at a time: were it more, the first would leave nothing to the last."""
        return -(-len(self._order) // len(self.board.role_groups.replicas)) * self.unit

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        """At most `room` requests, each with its place in the list."""
        missing = room - len(self._mine)
        if missing > 0 and not self._is_drawn:
            self._draw(-(-missing // self.unit))
        return [(i, self.requests[i]) for i in (self._mine.popleft() for _ in range(min(room, len(self._mine))))]

    def is_empty(self) -> bool:
        """Whether all requests were taken, as far as this lane knows."""
        return self._is_drawn and not self._mine

    def close(self):
        """Every lane says so, behind its last request."""
        self.board.close()

    def _draw(self, units: int):
        board = self.board
        first = board.broadcast_in_replica(
            board.store.add(board.key, units) - units if board.role_groups.is_leader else 0
        )
        self._is_drawn = first + units >= len(self._order)
        self._mine.extend(itertools.chain.from_iterable(self._order[first : first + units]))


def _unfinished(requests: list[GenerationRequest], places: Iterable[int]) -> list[int]:
    """Those places whose requests have something left to write."""
    return [i for i in places if requests[i].max_new_tokens > 0]


class GroupEarlyStop:
    """The groups that come in first: those whose longest response is the shortest, of equal ones the first numbers.

    Of a response that goes on, new tokens count; groups that are whole before take no part. This says nothing of when
    or where they were written, so it is the same in every layout. The entry in the store holds the best so far, as
    longest · 2³² + number; once there are enough of them, nobody needs to write more tokens than the last of them has.
    """

    def __init__(self, wanted: int, samples: int, requests: list[GenerationRequest], role_groups: RoleGroups):
        """`wanted`: how many come in, whole ones among them, which are fewer. `requests`: of all lanes."""
        self.samples, self.board = samples, StoreCounter(role_groups)
        self._limits = [request.max_new_tokens for request in requests]
        self._left = Counter(i // samples for i, limit in enumerate(self._limits) if limit)  # responses without an end
        self._longest = dict.fromkeys(self._left, 0)  # response of each group of this lane
        self.wanted = wanted - (len(requests) // samples - len(self._left))

    def ended(self, number: int, completion: Completion):
        """Hears of a response; all of a group are written by one lane."""
        length = len(completion.tokens)
        if not completion.finished and length < self._limits[number]:
            return  # it was cut
        group = number // self.samples
        self._left[group] -= 1
        self._longest[group] = max(self._longest[group], length)
        if not self._left[group] and self.board.role_groups.is_leader:
            self._enter(self._longest[group] << 32 | group)

    def longest(self) -> int | None:
        """Tokens that a response needs at most to be in a group that comes in. A collective of the lane."""
        known = self._extra_fields() if self.board.role_groups.is_leader else b""
        found = array.array("q", known)
        return self.board.broadcast_in_replica(found[-1] >> 32 if len(found) == self.wanted else 0) or None

    def close(self):
        """Every lane says so, when its engine rests."""
        self.board.close()

    def _extra_fields(self) -> bytes:
        store, key = self.board.store, self.board.key
        return bytes.fromhex(store.get(key).decode()) if store.check([key]) else b""

    def _enter(self, result: int):
        known = self._extra_fields()
        while True:
            best = array.array("q", sorted([*array.array("q", known), result])[: self.wanted]).tobytes()
            if result not in array.array("q", best):
                return
            now = bytes.fromhex(self.board.store.compare_set(self.board.key, known.hex(), best.hex()).decode())
            if now == best:
                return
            known = now


def shortest_groups(lengths: torch.Tensor, wanted: int) -> torch.Tensor:
    """[wanted] ascending numbers of the groups that come in, of the longest response's tokens of each group [G].

    What `GroupEarlyStop` stops for; at least `NEVER` for a group that has a response without an end.

    Raises:
        RuntimeError: fewer groups are whole.
    """
    order = sorted((length, group) for group, length in enumerate(lengths.tolist()) if length < UNFINISHED)
    if len(order) < wanted:
        raise RuntimeError(f"rollout: {len(order)} groups were written, {wanted} are wanted")
    return torch.tensor(sorted(group for _, group in order[:wanted]), dtype=torch.int64)
