"""A guest: a replica of a run's rollout in a program of its own (`python -m megarl.generate`), on each of its ranks.

Its leader reads the ledger and tells the other ranks what to do. It takes requests of a replica of the run as long as
there are free ones, generates them with the weights that they ask for, and sends each answer as soon as it is there.
"""

import dataclasses
import json
import os
import secrets
import signal
import sys
import time
from typing import Any

from megarl.algorithms.token_sampling import SamplingSettings
from megarl.arguments import RunConfig
from megarl.checkpoint import manifest, resume
from megarl.child_process import STOP_SIGNALS
from megarl.errors import UsageError
from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.mcore.model import gpt
from megarl.observe import activity
from megarl.observe.timers import Timers
from megarl.rollout import guest_ledger
from megarl.rollout.bank import numerics, pack
from megarl.rollout.guest_ledger import ENDED, HOME, LEFT, PAUSE, Front, Ledger
from megarl.rollout.requests import thinking_budget_of
from megarl.rollout.rollout import Rollout
from megarl.trainers.setup import build_role_encoder, progress_limit, read_inputs

MAX_BEAT = 1.0  # seconds at most between two heartbeats
_PLAIN = (bool, int, float, str, type(None))


def facts_of(config: RunConfig, size: int) -> dict[str, Any]:
    """What a guest must have in common with a run of that many ranks, or has to know, as JSON."""
    rollout = config.roles["rollout"]
    sizes = parallel_sizes(rollout.megatron)
    model = {name: value for name, value in vars(rollout.megatron).items() if isinstance(value, _PLAIN)}
    found = {
        "size": size,
        "ranks_per_node": int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        "ranks": sizes.replica_size(),
        "replicas": sizes.data(len(rollout.ranks)),
        "timeout": config.settings.replica_timeout,
        "same": {
            "versions": manifest.versions(),
            "processor": list(numerics()),
            "seed": {"--seed": config.settings.seed},
            "settings": resume.settings_entry(config),
            "model": model,
        },
    }
    return json.loads(json.dumps(found, default=str))


def read_facts(store, address: str) -> dict[str, Any]:
    """What a run says of itself. UsageError if it is none."""
    try:
        facts = json.loads(store.get(HOME))
        if facts.keys() >= {"start", "kernels", "same", "size"}:
            return facts
    except (RuntimeError, ValueError, AttributeError):
        pass
    raise UsageError(f"{guest_ledger.FLAG} {address}: what answers there is no run with --replica-port")


def settings_of(config: RunConfig, facts: dict[str, Any], size: int, address: str) -> RunConfig:
    """The settings of a guest of that many ranks, of those of the run. UsageError if it cannot generate for it."""
    where, own = f"{guest_ledger.FLAG} {address}", facts_of(config, facts["size"])
    for kind, values in own["same"].items():
        if values == (theirs := facts["same"].get(kind)):
            continue
        if isinstance(values, dict) and isinstance(theirs, dict):
            name = next(n for n in sorted({*values, *theirs}) if values.get(n) != theirs.get(n))
            raise UsageError(f"{where}: the run has another {kind}: {name} is {theirs.get(name)} there and "
                             f"{values.get(name)} here")  # fmt: skip
        raise UsageError(f"{where}: the run has another {kind}: {theirs} there and {values} here")
    if size != own["ranks"]:
        raise UsageError(f"{where}: a replica of the run has {own['ranks']} ranks; this program has {size}")
    rollout, ranks = config.roles["rollout"], range(size)
    role = dataclasses.replace(rollout, ranks=ranks, model_role="actor")
    settings = dataclasses.replace(
        config.settings, save=None, load=None, replica_port=None, verify_weights=False, kernels=facts["kernels"],
        role_map=None, generation_lag=0,
    )  # fmt: skip
    roles = {"actor": dataclasses.replace(role, name="actor"), "rollout": role}
    return dataclasses.replace(config, settings=settings, roles=roles, trained=(), rewards=(), warnings=())


class GuestInputs:
    """The tokenizer of the policy, read before the process group exists. UsageError."""

    def __init__(self, config: RunConfig):
        role = config.roles["rollout"]
        self.encoder = build_role_encoder(role, config.settings)
        self.thinking = thinking_budget_of(config.settings, self.encoder)


def serve(config: RunConfig, timers: Timers, address: str, facts: dict[str, Any]):
    """Builds the model, without weights, and generates until the run ends or a signal comes."""
    inputs, mesh, _ = read_inputs(config, timers, lambda: GuestInputs(config), sys.stderr)
    role, groups, tokenizer = config.roles["rollout"], mesh["actor"], inputs.encoder.tokenizer
    policy = gpt.build_frozen_model(role.megatron, role.model_vocab_size(tokenizer.vocab_size), groups.pg_collection)
    rollout = Rollout(config.settings, role, mesh, policy, tokenizer, timers, thinking=inputs.thinking)
    limit = progress_limit(config).total_seconds()
    guest = Guest(rollout, address, facts, limit)
    with timers.phase("actor", "rollout"):
        guest.run()


class Guest:
    """A guest on one of its ranks. It is what its engine takes its requests from, too."""

    def __init__(self, rollout: Rollout, address: str, facts: dict[str, Any], limit: float):
        """`limit`: seconds that it waits for a run that has gone."""
        self.rollout, self.groups, self._address, self._limit = rollout, rollout.role_groups, address, limit
        self._facts, self._timeout = facts, facts["timeout"]
        self.weights, self._knows_base = "", False  # name of those that it has
        self._is_stopped = False
        self._pause = min(MAX_BEAT, self._timeout / 10)
        self._beats, self._beat_at, self._steps = 0, 0.0, 0
        self._front, self._replica, self._is_closed = Front(), 0, True
        self._places: dict[int, tuple[int, int, int]] = {}  # of each replica of the run: call, next request, next free
        self._held: dict[int, tuple[GenerationRequest, int]] = {}  # requests that run, and the step that took them
        self._ledger: Ledger | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: object):
        self._is_stopped = True

    def run(self):
        """Generates until the run ends, a signal comes, or the run has gone for too long."""
        if self.groups.is_leader:
            self._join(guest_ledger.find(self._address, self._limit), self._facts)
        while True:
            order = self.groups.broadcast_object(self._next_order() if self.groups.is_leader else None)
            activity.tick()
            if order is None:
                return
            self._replica, self._front = order
            if self._front.weights == self.weights:
                self._generate()
            elif self._front.weights:
                self._take_weights()

    # -- the run -------------------------------------------------------------------------------------------------------

    def _join(self, store, facts: dict[str, Any]):
        self._facts, self._ledger, self._places = facts, Ledger(store, facts["start"]), {}
        self.number = store.add(self._ledger.key("members"), 1) - 1
        self._beat_at = 0.0
        self._beat()
        print(f"megarl: replica {self.number} of the run at {self._address}", file=sys.stderr, flush=True)

    def _beat(self, state: str = ""):
        """Shows that this guest goes on, at times."""
        activity.tick()
        if not state and time.monotonic() - self._beat_at < self._pause:
            return
        self._beat_at, self._beats = time.monotonic(), self._beats + 1
        tokens = sum(min(self._steps - since, request.max_new_tokens) for request, since in self._held.values())
        self._ledger.set(f"{self._beats} {tokens} {state}", "beat", self.number)

    def _next_order(self) -> tuple[int, Front] | None:
        """The next replica of the run that asks for something, and what; an empty one to look again; None: the end."""
        try:
            if self._is_stopped or self._ledger.get(ENDED) is not None:
                self._beat(LEFT)
                return None
            self._beat()
            for replica in range(self._facts["replicas"]):
                front = self._ledger.front(replica)
                _, number, free = self._place(replica, front)
                if front.weights and (number < front.posted or free < front.again):
                    return replica, front
        except RuntimeError:
            return (0, Front()) if self._find_again() else None
        time.sleep(PAUSE)
        return 0, Front()

    def _find_again(self) -> bool:
        """Joins the run again, which has gone; whether it came back in time. UsageError if it is another one."""
        print(f"megarl: the run at {self._address} is gone: waiting for it", file=sys.stderr, flush=True)

        def goes_on() -> bool:
            activity.tick()
            return not self._is_stopped

        store = guest_ledger.find(self._address, self._limit, goes_on)
        if store is None:
            print(f"megarl: no run at {self._address}: this replica ends", file=sys.stderr, flush=True)
            return False
        facts = read_facts(store, self._address)
        if facts["same"] != self._facts["same"]:
            raise UsageError(f"{guest_ledger.FLAG} {self._address}: there is another run now")
        self._join(store, facts)
        return True

    # -- weights -------------------------------------------------------------------------------------------------------

    def _take_weights(self):
        """Takes the weights that the front asks for, over a pair of each rank; without them it looks again."""
        pair = self.groups.broadcast_object(self._ask_for_weights() if self.groups.is_leader else None)
        if pair is None:
            return
        failure, self.weights, models = None, "", self.rollout.weights_by_part()
        place = self.groups.replica.index(self.groups.rank)
        try:
            store = self._ledger.store if self._ledger else guest_ledger.find(self._address, self._timeout)
            where = f"{self._facts['start']}/pair/{pair}/{place}"
            guest_ledger.move_weights(store, where, 1, models[self._knows_base :], self._timeout)
        except (RuntimeError, AttributeError) as error:  # the run has gone, or could not be found again
            failure = str(error)
        self.rollout.load_weights()
        if not any(self.groups.gather(failure)):
            self.weights = self.rollout.name_of_weights()
        is_right = self.weights == self._front.weights
        if self.weights and not is_right and not self._knows_base:
            raise RuntimeError("the weights that came are not those of the run")
        self._knows_base = is_right and len(models) > 1

    def _ask_for_weights(self) -> str | None:
        """The name of a pair over which they come; None: they are not needed any more."""
        pair = secrets.token_hex(8)
        try:
            want = json.dumps([pair, self._front.weights, self._knows_base]).encode()
            self._ledger.push(want, "wants", self._replica)
            while (given := self._ledger.get("pair", pair)) is None:
                self._beat()
                time.sleep(PAUSE)
                is_asked = self._ledger.front(self._replica).weights == self._front.weights
                if (self._is_stopped or not is_asked) and self._ledger.is_set("", "refused", "pair", pair):
                    return None
            return pair if given == b"given" else None
        except RuntimeError:
            return None

    # -- requests ------------------------------------------------------------------------------------------------------

    def _generate(self):
        """Generates requests of the front until there are no free ones."""
        front, self._is_closed, self._steps = self._front, False, 0
        engine = self.rollout.engine
        stream = engine.stream(
            self, tuple(front.end_ids), SamplingSettings(**front.sampling or {}), max_requests=front.share,
            response_limit=self._limit_now, interrupt=self._look,
        )  # fmt: skip
        for number, completion in stream:
            if self.groups.is_leader:
                self._answer(number, completion, engine.interrupted > 0)
        self._held.clear()

    def _answer(self, number: int, completion: Completion, has_left: bool):
        request, _ = self._held.pop(number)
        if has_left and not self._is_stopped:
            return  # nobody asks for it
        counts = self.rollout.engine.take_counts()
        facts = {
            "number": number, "guest": str(self.number), "weights": self.weights, "base": request.written,
            "left": has_left, "counts": list(counts),
        }  # fmt: skip
        try:
            self._ledger.push(pack(facts, completion), "answers", self._replica)
        except RuntimeError:
            self._is_closed = True

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        """As of a source of the engine: leases the first free requests."""
        self._steps += 1
        taken = self.groups.broadcast_object(self._lease(room) if self.groups.is_leader else None)
        taken, self._is_closed, self._front = taken
        self._held |= {number: (request, self._steps) for number, request in taken}
        return taken

    def _lease(self, room: int) -> tuple[list[tuple[int, GenerationRequest]], bool, Front]:
        """(requests that this guest has from now on, whether there will be no more, the front now)."""
        taken: list[tuple[int, GenerationRequest]] = []
        try:
            self._beat()
            front = self._ledger.front(self._replica)
            if self._is_stopped or front[:2] != self._front[:2]:
                return [], True, self._front
            first, number, free = self._place(self._replica, front)
            while len(taken) < room and (free < front.again or number < front.posted):
                if free < front.again:
                    own, free = int(self._ledger.get("again", self._replica, first, free) or -1), free + 1
                else:
                    own, number = number, number + 1
                if self._ledger.is_set("", str(self.number), "lease", self._replica, own):
                    request = self._ledger.request(self._replica, own, self.rollout.thinking)
                    taken += [] if request is None else [(own, request)]
            self._places[self._replica] = first, number, free
            return taken, False, front
        except RuntimeError:
            return [], True, self._front

    def _place(self, replica: int, front: Front) -> tuple[int, int, int]:
        """Where this guest looks for free requests of a front."""
        place = self._places.get(replica)
        return place if place is not None and place[0] == front.first else (front.first, front.first, 0)

    def is_empty(self) -> bool:
        return self._is_closed

    def wait(self):
        """Nothing runs, and nothing is free here: another replica of the run may ask for something."""
        self._is_closed = True

    def _limit_now(self) -> int | None:
        return self._front.limit

    def _look(self) -> int:
        """Whether to stop: a signal has come, or nobody asks for the requests that run. A collective."""
        found = self._front, False
        if self.groups.is_leader:
            try:
                self._beat()
                front = self._ledger.front(self._replica)
                found = front, self._is_stopped or front[:2] != self._front[:2]
            except RuntimeError:
                found = self._front, True
        self._front, stops = self.groups.broadcast_object(found)
        return int(stops)
