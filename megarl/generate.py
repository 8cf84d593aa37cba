"""A replica of a run's rollout as a program of its own, which may join, leave, stop and die while the run goes on.

Give it the flags of the run, and the address of its `--replica-port`. It has as many ranks as one replica of the run's
rollout, generates with the weights of the run, and ends with it, or after SIGTERM. When the run starts again it goes
on.

    python -m megarl.train_rl --config run.yaml --replica-port 29600
    python -m megarl.generate --join host:29600 --config run.yaml
"""

import argparse
import dataclasses
import functools
import json
import os
import secrets
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from megarl import arguments
from megarl.algorithms.token_sampling import SamplingSettings
from megarl.arguments import RunConfig
from megarl.child_process import STOP_SIGNALS
from megarl.data.detokenizer import StopMatcher
from megarl.errors import ArgumentParser, UsageError
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.mcore.lora import adapter
from megarl.mcore.model import gpt
from megarl.observe import activity
from megarl.observe.timers import Timers
from megarl.rollout import guest_ledger
from megarl.rollout.bank import pack
from megarl.rollout.guest_ledger import (
    ENDED,
    FLAG,
    HOME,
    LEFT,
    PAUSE,
    Front,
    entry,
    facts_of,
    front_of,
    is_set,
    request_of,
)
from megarl.rollout.requests import thinking_budget_of
from megarl.rollout.rollout import Rollout
from megarl.trainers.launch import launch, refuse
from megarl.trainers.setup import build_role_encoder, progress_limit, read_inputs

MEETING = 300.0  # seconds until a run answers, which may be starting
ANSWER = timedelta(seconds=10)  # until it has said what it is
MAX_BEAT = 1.0  # seconds at most between two heartbeats


def read_flags(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The program's own flags, and those of the run. UsageError for wrong ones."""
    own = ArgumentParser(prog="megarl.generate", allow_abbrev=False, description=(__doc__ or "").partition("\n")[0])
    own.add_argument("--join", required=True, metavar="HOST:PORT", help="address of the run's --replica-port")
    options, flags = own.parse_known_args(argv)
    guest_ledger.address_of(options.join)
    return options, flags


def read_facts(store: TCPStore, address: str) -> dict[str, Any]:
    """What a run says of itself. UsageError if it is none."""
    try:
        store.wait([HOME], ANSWER)
        facts = json.loads(store.get(HOME))
        if facts.keys() >= {"start", "kernels", "same", "size"}:
            return facts
    except (RuntimeError, ValueError, AttributeError):
        pass
    raise UsageError(f"{FLAG} {address}: what answers there is no run with --replica-port")


def joined(
    address: str, found: dict, argv: list[str], size: int, program: str, ranks_per_node: int
) -> tuple[RunConfig, bool]:
    """The settings of a replica, as of `launch.parse_or_resume`; `found` gets what the run has said.

    UsageError if no run answers there, or if it has other settings, versions, or replicas of other sizes.
    """
    store = guest_ledger.find(address, MEETING)
    if store is None:
        raise UsageError(f"{FLAG} {address}: no run answers there; allowed is the --replica-port of a run")
    found |= read_facts(store, address)
    config = arguments.parse(argv, found["size"], program, found["ranks_per_node"])
    if config.settings.replica_port is None:
        raise UsageError(f"{FLAG} {address}: needs the flags of the run, with its --replica-port")
    own, theirs = facts_of(config), found["same"]
    for name, value in own["same"].items():
        if value != theirs.get(name):
            raise UsageError(f"{FLAG} {address}: the run has {name} {theirs.get(name)}; here it is {value}")
    if size != own["ranks"]:
        raise UsageError(f"{FLAG} {address}: a replica of the run has {own['ranks']} ranks; this program has {size}")
    return settings_of(config, size, found["kernels"]), False


def settings_of(config: RunConfig, size: int, kernels: str) -> RunConfig:
    """The settings of a replica of so many ranks: one policy, which its rollout runs on."""
    role = dataclasses.replace(config.roles["rollout"], ranks=range(size), model_role="actor")
    own: dict[str, Any] = dict.fromkeys(("save", "load", "replica_port", "role_map"))
    settings = dataclasses.replace(config.settings, **own, kernels=kernels, verify_weights=False, generation_lag=0)
    roles = {"actor": dataclasses.replace(role, name="actor"), "rollout": role}
    return dataclasses.replace(config, settings=settings, roles=roles, trained=(), rewards=(), warnings=())


def generate(address: str, facts: dict[str, Any], config: RunConfig, timers: Timers):
    """Builds the model, without weights, and generates until the run ends or a signal comes."""
    role = config.roles["rollout"]
    encoder, mesh, _ = read_inputs(config, timers, lambda: build_role_encoder(role, config.settings), sys.stderr)
    size, thinking = role.model_vocab_size(encoder.tokenizer.vocab_size), thinking_budget_of(config.settings, encoder)
    policy = gpt.build_frozen_model(role.megatron, size, mesh["actor"].pg_collection)
    if role.lora is not None and adapter.keeps_apart(role.megatron):
        adapter.add_factors(policy, role.lora, role.megatron, mesh["actor"].pg_collection, is_frozen=True)
    rollout = Rollout(config.settings, role, mesh, policy, encoder.tokenizer, timers, thinking=thinking)
    guest = Guest(rollout, address, facts, progress_limit(config).total_seconds())
    with timers.phase("actor", "rollout"):
        guest.run()


class Guest:
    """A guest on one of its ranks. It is what its engine takes its requests from, too."""

    def __init__(self, rollout: Rollout, address: str, facts: dict[str, Any], limit: float):
        """`limit`: seconds that it waits for a run that has gone."""
        self.rollout, self.groups, self._address, self._limit = rollout, rollout.role_groups, address, limit
        self._facts, self._timeout = facts, facts["timeout"]
        self._matcher = functools.lru_cache(64)(functools.partial(StopMatcher, rollout.tokenizer))
        self.weights, self._knows_base = "", False  # name of those that it has
        self._is_stopped = False
        self._pause = min(MAX_BEAT, self._timeout / 10)
        self._beats, self._beat_at, self._steps, self._leases = 0, 0.0, 0, 0
        self._front, self._replica, self._is_closed = Front(), 0, True
        self._places: dict[int, tuple[int, int, int]] = {}  # of each replica of the run: call, next request, next free
        self._held: dict[int, tuple[GenerationRequest, int]] = {}  # requests that run, and the step that took them
        self._ledger: PrefixStore | None = None
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

    def _join(self, store: TCPStore, facts: dict[str, Any]):
        self._facts, self._ledger, self._places = facts, PrefixStore(facts["start"], store), {}
        self.number = self._ledger.add("members", 1) - 1
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
        self._ledger.set(f"beat/{self.number}", f"{self._beats} {tokens} {state}")

    def _next_order(self) -> tuple[int, Front] | None:
        """The next replica of the run that asks for something, and what; an empty one to look again; None: the end."""
        try:
            if self._is_stopped or self._ledger.check([ENDED]):
                self._beat(LEFT)
                return None
            self._beat()
            for replica in range(self._facts["replicas"]):
                front = front_of(self._ledger, replica)
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
            raise UsageError(f"{FLAG} {self._address}: there is another run now")
        self._join(store, facts)
        return True

    # -- weights -------------------------------------------------------------------------------------------------------

    def _take_weights(self):
        """Takes the weights that the front asks for, over a pair of each rank; without them it looks again."""
        asked = (self._ask_for_weights(), self._facts["start"]) if self.groups.is_leader else None
        pair, start = self.groups.broadcast_object(asked)
        if pair is None:
            return
        failure, self.weights, models = None, "", self.rollout.weights_by_part()
        place = self.groups.replica.index(self.groups.rank)
        try:
            if (store := guest_ledger.find(self._address, self._timeout)) is None:
                raise RuntimeError("the run has gone")
            ledger = PrefixStore(start, store)
            guest_ledger.move_weights(ledger, f"pair/{pair}/{place}", 1, models[self._knows_base :], self._timeout)
        except RuntimeError as error:
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
            self._ledger.queue_push(f"wants/{self._replica}", want)
            while (given := entry(self._ledger, f"pair/{pair}")) is None:
                self._beat()
                time.sleep(PAUSE)
                is_asked = front_of(self._ledger, self._replica).weights == self._front.weights
                if (self._is_stopped or not is_asked) and is_set(self._ledger, f"pair/{pair}", "", "refused"):
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
            self,
            tuple(front.end_ids),
            SamplingSettings(**front.sampling or {}),
            max_requests=front.share,
            response_limit=self._limit_now,
            interrupt=self._look,
        )
        for number, completion in stream:
            if self.groups.is_leader:
                self._answer(number, completion, engine.interrupted > 0)
        self._held.clear()

    def _answer(self, number: int, completion: Completion, has_left: bool):
        request, _ = self._held.pop(number)
        if has_left and not self._is_stopped:
            return  # nobody asks for it
        counts = [*self.rollout.engine.take_counts()]
        facts = {"number": number, "guest": str(self.number), "weights": self.weights, "counts": counts}
        facts |= {"base": request.written, "left": has_left}
        try:
            self._ledger.queue_push(f"answers/{self._replica}", pack(facts, completion))
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
            front = front_of(self._ledger, self._replica)
            if self._is_stopped or front[:2] != self._front[:2]:
                return [], True, self._front
            first, number, free = self._place(self._replica, front)
            while len(taken) < room and (free < front.again or number < front.posted):
                if free < front.again:
                    own, free = int(entry(self._ledger, f"again/{self._replica}/{first}/{free}") or -1), free + 1
                else:
                    own, number = number, number + 1
                place = f"{self._replica}/{own}"
                self._leases += 1  # a lease of its own each time: a request may be in both lists
                is_mine = is_set(self._ledger, f"lease/{place}", "", f"{self.number} {self._leases}")
                if is_mine and own not in self._held:  # one that others were given meanwhile, and have not begun, runs
                    request = request_of(self._ledger, f"request/{place}", self.rollout.thinking, self._matcher)
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
                front = front_of(self._ledger, self._replica)
                found = front, self._is_stopped or front[:2] != self._front[:2]
            except RuntimeError:
                found = self._front, True
        self._front, stops = self.groups.broadcast_object(found)
        return int(stops)


def main(argv: list[str]):
    """Runs the program with the flags of the run."""
    try:
        options, flags = read_flags(argv)
    except UsageError as error:
        refuse(int(os.environ.get("RANK", 0)), error)
        sys.exit(2)
    facts: dict[str, Any] = {}
    sys.argv = [sys.argv[0], *flags]
    launch(functools.partial(generate, options.join, facts), "rl", functools.partial(joined, options.join, facts))


if __name__ == "__main__":
    main(sys.argv[1:])
