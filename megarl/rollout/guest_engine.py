"""What a run's rollout has in place of an engine if guests generate (`--replica-port`): it writes down requests in the
ledger, takes their answers, and gives weights to guests that ask for them.

A guest that shows no progress for `--replica-timeout` loses its requests to others. It is not told: what it still sends
has to be the same as the answer that counts, and is dropped.
"""

import dataclasses
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.arguments import RunConfig
from megarl.comm.role_mesh import RoleGroups
from megarl.errors import UsageError, warn
from megarl.mcore import device, kernel_choice
from megarl.mcore.inference.engine import RequestSource
from megarl.mcore.inference.generation import Completion, EngineCounts, GenerationRequest, Response
from megarl.mcore.weights.reshard_plan import LocalWeights
from megarl.observe import activity
from megarl.rollout import guest_ledger, response_log
from megarl.rollout.bank import unpack
from megarl.rollout.guest_ledger import ENDED, HOME, LEFT, PAUSE, Front, entry, facts_of, is_set, queued

MAX_REQUESTS = 1 << 30  # of a replica at a time: all that there are
MAX_LOOK = 1.0  # seconds at most between two looks at heartbeats
GOODBYE = 10.0  # seconds that guests have to leave at the end
_KEY = "megarl/guests"  # in the store of the ranks: where the ledger is
_COUNTED = ("reissued", "lost_tokens", "joined", "duplicates_differ")


class GuestEngine:
    """A replica of the run, on each of its ranks; it has the part of `RolloutEngine` that the rollout uses."""

    is_coupled, interrupted = False, 0

    def __init__(self, config: RunConfig, role_groups: RoleGroups):
        """Opens the ledger. A collective of the role. UsageError if the port is not free."""
        settings = config.settings
        self.role_groups, self._timeout = role_groups, settings.replica_timeout
        self.max_requests = settings.rollout_max_requests  # of a guest
        self._min_replicas, self._look_after = settings.min_replicas, min(MAX_LOOK, settings.replica_timeout / 10)
        self.weights = ""  # name of the present ones
        self.models: Callable[[], list[LocalWeights]] = list  # what guests need of them, what never changes first
        self._front = Front()
        self._open: dict[int, tuple[int, Response]] = {}  # by number in the ledger: number of the source, its response
        self._digests: dict[int, bytes] = {}  # of answers, by number
        self._reissued: set[int] = set()
        self._beats: dict[int, tuple[bytes, float]] = {}  # of guests: the last one, and when it was new
        self._looked = 0.0
        self._counts = EngineCounts()
        self._events = dict.fromkeys(_COUNTED, 0)
        self._said = False
        size = dist.get_world_size()
        world = {"size": size, "ranks_per_node": int(os.environ.get("LOCAL_WORLD_SIZE", size))}
        self._meet(settings.replica_port, facts_of(config) | world | {"kernels": kernel_choice.used()})

    def _meet(self, port: int, facts: dict[str, Any]):
        """Opens the ledger on the first rank, and connects the others."""
        ranks, own = dist.distributed_c10d._get_default_store(), self.role_groups.rank
        if own == self.role_groups.ranks.start:
            try:
                self._store = guest_ledger.serve(port)
            except UsageError as error:
                raise UsageError(str(error), own) from None
            start = secrets.token_hex(8)
            self._store.set(HOME, json.dumps(facts | {"start": start}))
            ranks.set(
                _KEY,
                json.dumps(["127.0.0.1" if facts["size"] == facts["ranks_per_node"] else socket.gethostname(), start]),
            )
        host, start = json.loads(ranks.get(_KEY))
        if own != self.role_groups.ranks.start:
            self._store = guest_ledger.find(f"{host}:{port}", guest_ledger.PATIENCE.total_seconds())
            if self._store is None:
                raise RuntimeError(f"{host}:{port}: the first rank of the rollout does not answer")
        self._ledger, self._replica = dist.PrefixStore(start, self._store), self.role_groups.dp_rank

    # -- requests ------------------------------------------------------------------------------------------------------

    def stream(
        self,
        source: RequestSource,
        end_ids: tuple[int, ...],
        settings: SamplingSettings,
        routes: bool = False,
        max_requests: int | None = None,
        response_limit: Callable[[], int | None] | None = None,
    ) -> Iterator[tuple[int, Completion]]:
        """Has guests generate all requests of a source; arguments and results as of `RolloutEngine.stream`."""
        assert not routes  # refused with the flags
        first = self._front.posted
        sampling = dataclasses.asdict(settings)
        self._front = Front(self.weights, first, first, sampling=sampling, end_ids=tuple(end_ids))
        if self.role_groups.is_leader:
            self._wait_for_guests()
        try:
            while True:
                room = (max_requests or MAX_REQUESTS) - len(self._open)
                if room > 0 and not source.is_empty():
                    self._post(source.take(room))
                if not self._open:
                    if source.is_empty():
                        return
                    source.wait()
                    continue
                if response_limit is not None:
                    self._tell(limit=response_limit())
                yield from self._take_ended()
        finally:
            self._end_call(first)

    def _key(self, kind: str, number: object) -> str:
        return f"{kind}/{self._replica}/{number}"

    def _tell(self, **changes: Any):
        """Writes down what guests see of this replica."""
        front = self._front._replace(**changes)
        if front != self._front and self.role_groups.is_leader:
            self._ledger.set(f"front/{self._replica}", json.dumps(front))
        self._front = front

    def _post(self, requests: list[tuple[int, GenerationRequest]]):
        end = self._front.posted + len(requests)
        for own, (number, request) in zip(range(self._front.posted, end), requests, strict=True):
            self._open[own] = number, Response(request)
            if self.role_groups.is_leader:
                guest_ledger.post(self._ledger, self._key("request", own), request)
        share = -(-(end - self._front.first) // max(len(self._present()), 1))
        self._tell(posted=end, share=self.role_groups.broadcast_number(share))

    def _take_ended(self) -> list[tuple[int, Completion]]:
        """The requests that have ended; gives weights meanwhile. A collective of the replica."""
        found = self._look() if self.role_groups.is_leader else None
        ended, pairs = self.role_groups.broadcast_object(found)
        for pair, knows_base in pairs:
            self._give(pair, knows_base)
        results = []
        for own, completion in ended:
            results.append((self._open.pop(own)[0], completion))
            activity.tick()
        return results

    def _look(self) -> tuple[list[tuple[int, Completion]], list[tuple[str, bool]]]:
        """(completions by number, pairs over which guests take weights), on the leader."""
        gone = self._silent_guests()  # before the answers: a guest that leaves sends them first
        completions = [
            each for item in queued(self._ledger, f"answers/{self._replica}") if (each := self._answer(item))
        ]
        for guest in gone:
            self._take_over(guest)
        pairs = []
        for item in queued(self._ledger, f"wants/{self._replica}"):
            pair, weights, knows_base = json.loads(item)
            if weights == self.weights and is_set(self._ledger, f"pair/{pair}", "", "given"):
                pairs.append((pair, knows_base))
        if not completions and not pairs:
            time.sleep(PAUSE)
        return completions, pairs

    def _answer(self, item: bytes) -> tuple[int, Completion] | None:
        """A completion that ends its request; None: it does not count, or is the begin of one that goes on."""
        try:
            record = response_log.unpacked(item)
            own, guest, weights, base, has_left, counts = (
                record.facts[n] for n in ("number", "guest", "weights", "base", "left", "counts")
            )
            completion = unpack(record)
        except (ValueError, KeyError) as error:
            warn([f"a replica has sent a damaged response, which is generated again: {error}"])
            self._free_all()
            return None
        self._counts = self._counts.plus(EngineCounts._make(counts))
        if own not in self._open:
            self._compare(own, completion, has_left)
            return None
        if weights != self.weights:
            raise RuntimeError(f"replica {guest} has generated with other weights than those that it was asked for")
        _, response = self._open[own]
        base -= response.asked.written
        kept = response.tokens[:base], response.logprobs[:base]
        whole = Completion(kept[0] + completion.tokens, kept[1] + completion.logprobs, completion.finished)
        if not has_left:
            self._digests[own] = _digest(whole)
            self._ledger.delete_key(self._key("request", own))
            return own, whole
        if len(whole.tokens) > response.length:
            response.spans.clear()
            response.take(whole, None)
            guest_ledger.post(self._ledger, self._key("request", own), response.request())
        self._free(own, guest)
        return None

    def _compare(self, own: int, completion: Completion, has_left: bool):
        """Notes whether a second answer is the first one."""
        known = self._digests.get(own)
        if known is None or has_left or own not in self._reissued:
            return
        if known != _digest(completion):
            self._events["duplicates_differ"] += 1
            warn([f"two replicas have generated request {own} differently: the run is not deterministic"])

    def _end_call(self, first: int):
        """Nothing is asked for any more."""
        self._tell(weights="")
        self._looked = 0.0  # the next call looks first
        for own in range(first, self._front.posted) if self.role_groups.is_leader else ():
            self._ledger.delete_key(self._key("request", own))
            self._ledger.delete_key(self._key("lease", own))
        self._open.clear()
        self._digests = {own: digest for own, digest in self._digests.items() if own in self._reissued}

    # -- guests --------------------------------------------------------------------------------------------------------

    def _present(self) -> list[int]:
        """Guests that generate, as far as the leader knows."""
        now = time.monotonic()
        return [
            guest
            for guest, (beat, since) in self._beats.items()
            if now - since <= self._timeout and LEFT not in beat.decode()
        ]

    def _silent_guests(self) -> list[int]:
        """Guests that have left, or show no progress; looks only from time to time."""
        now = time.monotonic()
        if now - self._looked < self._look_after:
            return []
        self._looked = now
        for guest in range(self._ledger.add("members", 0)):
            beat = entry(self._ledger, f"beat/{guest}")
            if beat is None:
                continue
            if guest not in self._beats:
                self._events["joined"] += 1
                self._said = False
            if guest not in self._beats or self._beats[guest][0] != beat:
                self._beats[guest] = beat, now
                activity.tick()
        present = self._present()
        if not present and not self._said:
            print("megarl: no replica generates: waiting for one to join", file=sys.stderr, flush=True)
            self._said = True
        return sorted({*self._beats} - {*present})

    def _wait_for_guests(self):
        """Waits until there are `--min-replicas`, on the leader; the heartbeat's limit ends it."""
        while self._looked == 0.0 or len(self._present()) < self._min_replicas:
            self._silent_guests()
            time.sleep(PAUSE)

    def _take_over(self, guest: int):
        """Frees what a guest generates."""
        held = [own for own in self._open if self._lease_of(own).partition(" ")[0] == str(guest)]
        if not held:
            return
        beat = self._beats[guest][0].decode().split()
        self._events["lost_tokens"] += int(beat[1])
        silence = "has left" if LEFT in beat else f"shows no progress for {self._timeout:g} s"
        print(f"megarl: replica {guest} {silence}: {len(held)} requests go to others", file=sys.stderr, flush=True)
        for own in held:
            self._free(own, str(guest))

    def _lease_of(self, own: int) -> str:
        """Guest and number of a lease; "": there is none."""
        return (entry(self._ledger, self._key("lease", own)) or b"").decode()

    def _free(self, own: int, guest: str):
        """Lets others generate a request, if it is still the guest's."""
        lease = self._lease_of(own)
        is_theirs = guest and lease.partition(" ")[0] == guest
        if is_theirs and is_set(self._ledger, self._key("lease", own), lease, ""):
            self._reissued.add(own)
            self._events["reissued"] += 1
            self._ledger.set(self._key("again", f"{self._front.first}/{self._front.again}"), str(own))
            self._tell(again=self._front.again + 1)

    def _free_all(self):
        for own in self._open:
            self._free(own, self._lease_of(own).partition(" ")[0])

    def _give(self, pair: str, knows_base: bool):
        """Sends this rank's weights to the same rank of a guest; one that is gone loses its requests later."""
        place, models = self.role_groups.replica.index(self.role_groups.rank), self.models()
        try:
            guest_ledger.move_weights(self._ledger, f"pair/{pair}/{place}", 0, models[knows_base:], self._timeout)
        except RuntimeError as error:
            warn([f"a replica has not taken its weights: {str(error).splitlines()[0]}"])

    # -- what the rollout reads ----------------------------------------------------------------------------------------

    def take_counts(self) -> EngineCounts:
        """What the engines of guests did for answers since the last call."""
        counts, self._counts = self._counts, EngineCounts()
        return counts

    def take_image_counts(self) -> None:
        """Prompts have no images."""

    def take_metrics(self) -> dict[str, float]:
        """The metrics of guests since the last call. A collective of the role."""
        if is_leader := self.role_groups.is_leader:
            self._silent_guests()  # notes those that have come since the last look
        own = [self._events[name] if is_leader else 0 for name in _COUNTED]
        present = len(self._present()) if is_leader else 0
        self._events = dict.fromkeys(_COUNTED, 0)
        largest = self.role_groups.dp_max(torch.tensor([present, own[2]], device=device.device())).tolist()
        total = self.role_groups.dp_all_reduce(torch.tensor(own, device=device.device())).tolist()
        found = {f"rollout/{name}": value for name, value in zip(_COUNTED, total, strict=True)}
        return found | {"rollout/replicas": largest[0], "rollout/joined": largest[1]}

    def close(self):
        """Lets guests end, at the end of the run."""
        if self.role_groups.rank != self.role_groups.ranks.start:
            return
        self._ledger.set(ENDED, "")
        self._said = True  # that there are none
        deadline = time.monotonic() + GOODBYE
        while time.monotonic() < deadline and self._present():
            self._looked = 0.0
            self._silent_guests()
            time.sleep(PAUSE)


def _digest(completion: Completion) -> bytes:
    return response_log.hash_of(repr((completion.tokens, completion.logprobs, completion.finished)).encode())
