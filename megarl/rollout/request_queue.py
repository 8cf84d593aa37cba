"""Coordinates the rollout's replicas during generation: a shared queue of requests, and early stop with enough groups.

Response lengths are not known in advance, so replicas with equally many requests finish at different times. Responses
do not depend on the replica that generates them, because every request has its own random stream.
"""

import itertools
import json
from collections import deque

import torch
import torch.distributed as dist

from megarl.comm.role_mesh import RoleGroups
from megarl.mcore.inference.generation import GenerationRequest
from megarl.rollout.requests import RoundRequests

UNFINISHED = 1 << 40  # stands for the length of an unfinished response
_calls = itertools.count()  # numbers the calls; all ranks of the rollout make the same calls in the same order


class StoreEntry:
    """An entry in the rendezvous store for one call of the rollout, on each of its ranks; only the replica leaders
    access it. Every replica calls `close` when its engine has stopped."""

    def __init__(self, role_groups: RoleGroups):
        self.role_groups, self.leases = role_groups, list[str]()  # `leases`: keys of further entries of the call
        self.store, self.key = dist.distributed_c10d._get_default_store(), f"megarl/rollout/{next(_calls)}"

    def close(self):
        """Deletes the entries after the last replica has called this."""
        done = f"{self.key}/done"
        if self.role_groups.is_leader and self.store.add(done, 1) == len(self.role_groups.replicas):
            for key in (self.key, done, *self.leases):
                self.store.delete_key(key)


class SharedRequestQueue(StoreEntry):
    """The requests of all replicas, longest prompt first. A `RequestSource` of the engine, one object on each rank.

    Each request, or group, has a lease in the store: the replica that has set it first. A replica takes the first free
    ones, without waiting; its leader does so for all of its ranks. So each is free or someone's at any instant, also
    when a leader dies: nothing is drawn that no lease names. The store's entry of the queue is only a hint: all leases
    before that number are taken, and others may be.
    """

    def __init__(self, requests: RoundRequests, whole_groups: bool, role_groups: RoleGroups):
        """`requests`: the same on every rank; finished ones are skipped, and a replica begins with those that only it
        can continue. `whole_groups`: all responses to a prompt go to one replica, where they can share its KV cache."""
        super().__init__(role_groups)
        self.requests = requests
        groups = [[i for i in requests.ids_of(n) if requests.is_open(i)] for n in range(len(requests.prompts))]
        units = [ids for ids in groups if ids] if whole_groups else [[i] for ids in groups for i in ids]
        owned = [(requests.prompt_of(ids[0]).dp_rank, ids) for ids in units]
        free = (ids for owner, ids in owned if owner is None)
        self._order = sorted(free, key=lambda ids: (-len(requests.prompt_of(ids[0]).tokens), ids[0]))
        own = (ids for owner, ids in owned if owner == role_groups.dp_rank)
        self._drawn = deque(itertools.chain.from_iterable(own))  # by this replica, not yet taken by its engine
        self.leases = [f"{self.key}/{number}" for number in range(len(self._order))]
        self._next = 0  # of the order; all before it are leased
        self._largest = int(requests.groups.sizes.max()) if whole_groups and len(requests) else 1
        # Limit on the requests that a replica runs at a time, so that the first replica cannot draw all of them.
        self.share = -(-len(units) // len(role_groups.replicas)) * self._largest

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        """`room` requests, each with its index in the list; fewer only if there are no more."""
        while (missing := room - len(self._drawn)) > 0 and self._next < len(self._order):
            self._draw(-(-missing // self._largest))  # smaller groups leave room for more
        ids = [self._drawn.popleft() for _ in range(min(room, len(self._drawn)))]
        return list(zip(ids, self.requests.build(ids), strict=True))

    def is_empty(self) -> bool:
        """Whether all requests were taken, as far as this replica knows."""
        return self._next == len(self._order) and not self._drawn

    def wait(self):
        """There is nothing to wait for: the queue is known from the start."""

    def _draw(self, units: int):
        drawn = self._lease(units) if self.role_groups.is_leader else []
        self._next, drawn = self.role_groups.broadcast_object((self._next, drawn))
        self._drawn.extend(itertools.chain.from_iterable(self._order[number] for number in drawn))

    def _lease(self, units: int) -> list[int]:
        """The first free ones of the order, at most `units`, from now on this replica's. For leaders."""
        own, drawn = str(self.role_groups.dp_rank), []
        hint = self.store.compare_set(self.key, "", "0").decode()
        self._next = max(self._next, int(hint))
        while len(drawn) < units and self._next < len(self._order):
            if self.store.compare_set(self.leases[self._next], "", own).decode() == own:
                drawn.append(self._next)
            self._next += 1
        self.store.compare_set(self.key, hint, str(self._next))
        return drawn


class GroupEarlyStop(StoreEntry):
    """Stops generation when the earliest `wanted` groups are finished.

    Groups rank by the new tokens of their longest response, then by number. This does not depend on when or where a
    group was generated, so every layout selects the same groups. Groups that were finished before do not compete. The
    store entry holds the best groups so far, as longest · 2³² + number. Once it holds enough, no response needs more
    tokens than the last of them has. Of an episode the policy's tokens of all its turns in the round count.

    With `by_clock` the groups are those that are finished first, and the entry holds their numbers alone.
    """

    def __init__(self, wanted: int, requests: RoundRequests, role_groups: RoleGroups, by_clock: bool = False):
        """`wanted`: groups to select, including those finished before, which are fewer."""
        super().__init__(role_groups)
        self._requests, self._limits, self._by_clock = requests, requests.limits, by_clock
        self._ended: dict[int, list[int]] = {}  # lengths of the responses that ended here, by group
        self._before = [group for group in range(len(requests.prompts)) if not any(self._limits_of(group))]
        self.wanted = wanted - len(self._before)

    def _limits_of(self, group: int) -> list[int]:
        return [self._limits[i] for i in self._requests.ids_of(group)]

    def add(self, number: int, length: int):
        """Records that a response, or an episode, has ended with that many new tokens. One replica has a group's."""
        group = self._requests.group_of[number]
        lengths = self._ended.setdefault(group, [])
        lengths.append(length)
        is_complete = len(lengths) == sum(limit > 0 for limit in self._limits_of(group))
        if is_complete and self.role_groups.is_leader:
            self._publish(group if self._by_clock else max(lengths) << 32 | group)

    def longest(self) -> int | None:
        """Limit on the new tokens of a response, None until enough groups are finished. A collective of the replica."""
        best = self._best_results() if self.role_groups.is_leader else []
        found = self.role_groups.broadcast_number(best[-1] >> 32 if len(best) == self.wanted else -1)
        return None if found < 0 else found

    def is_enough(self) -> bool:
        """Whether enough groups are finished. For leaders."""
        return len(self._best_results()) == self.wanted

    def first_groups(self) -> list[int]:
        """The groups `by_clock`, ascending, with those finished before; once all replicas have stopped. A collective of
        the replica."""
        first = self._best_results() if self.role_groups.is_leader else []
        return sorted([*self._before, *self.role_groups.broadcast_object(first)])

    def _best_results(self) -> list[int]:
        """What the entry holds. For leaders."""
        return json.loads(self.store.compare_set(self.key, "", "[]"))

    def _publish(self, result: int):
        known = self._best_results()
        while True:
            results = [*known, result]
            best = (results if self._by_clock else sorted(results))[: self.wanted]
            if result not in best:
                return
            stored = json.loads(self.store.compare_set(self.key, json.dumps(known), json.dumps(best)))
            if stored == best:
                return
            known = stored  # another replica was faster


def shortest_groups(lengths: torch.Tensor, wanted: int) -> torch.Tensor:
    """[wanted] int64 ascending numbers of the groups with the shortest longest response, as in `GroupEarlyStop`.

    `lengths` [G]: tokens of each group's longest response, at least `UNFINISHED` if one is unfinished. RuntimeError if
    fewer groups are finished.
    """
    order = sorted((length, group) for group, length in enumerate(lengths.tolist()) if length < UNFINISHED)
    if len(order) < wanted:
        raise RuntimeError(f"rollout: {len(order)} groups are finished, {wanted} are wanted")
    return torch.tensor(sorted(group for _, group in order[:wanted]), dtype=torch.int64)
