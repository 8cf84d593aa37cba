"""Finished responses of the running steps on disk (`--keep-responses`), so that a killed run generates only the rest.

After a restart a response is used again if its request is exactly the same: policy, prompt, random stream, sampling,
and everything that may change rounding. It depends on nothing else. A turn of an episode is a response to all tokens
before it: a killed run plays its episodes again, with the answers from the journal, and generates the missing turns.
"""

import argparse
import contextlib
import functools
import itertools
import math
import os
import platform
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.arguments import Settings
from megarl.checkpoint import folders
from megarl.comm.role_mesh import RoleGroups
from megarl.errors import warn
from megarl.flags.generation_flags import can_keep_responses
from megarl.mcore import device
from megarl.mcore.inference.engine import RequestSource
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.observe.files import step_name, step_of
from megarl.rollout import response_log
from megarl.rollout.response_log import SUFFIX, Entry, Record

FOLDER = "responses"  # in a run's folder


def keeps(settings: Settings) -> bool:
    """Whether a run keeps the responses of its rollout, unless it `lacks_routes`."""
    return settings.keep_responses and can_keep_responses(settings)


def lacks_routes(settings: Settings, rollout: argparse.Namespace) -> bool:
    """Whether a replica's leader has not all routes of its responses, since each pipeline stage records its own."""
    return settings.router_replay == "rollout" and rollout.pipeline_model_parallel_size > 1


def numerics() -> tuple:
    """What changes the rounding of a forward pass besides model and layout."""
    processor = torch.cuda.get_device_name() if device.has_cuda() else torch.backends.cpu.get_cpu_capability()
    return torch.__version__, platform.machine(), processor


def pack(facts: dict[str, Any], completion: Completion) -> bytes:
    """The record of a response, with facts about its request."""
    fields = {
        "tokens": torch.tensor(completion.tokens, dtype=torch.int32),
        "rollout_logprobs": torch.tensor(completion.logprobs, dtype=torch.float32),
    }
    if completion.routes is not None:
        fields["routes"] = completion.routes.cpu()
    return response_log.packed(facts | {"finished": completion.finished}, fields)


def unpack(record: Record) -> Completion:
    """The response of a record. ValueError if it holds none."""
    fields, finished = record.fields, record.facts.get("finished")
    tokens, logprobs, routes = (fields.get(name) for name in ("tokens", "rollout_logprobs", "routes"))
    if tokens is None or logprobs is None or not isinstance(finished, bool):
        raise ValueError("it holds no response")
    kinds = (tokens.dtype, logprobs.dtype, None if routes is None else routes.dtype)
    if kinds not in ((torch.int32, torch.float32, of_routes) for of_routes in (None, torch.int16)):
        raise ValueError("its types do not fit")
    if tokens.dim() != 1 or logprobs.shape != tokens.shape:
        raise ValueError("its sizes do not fit")
    return Completion(tokens.tolist(), logprobs.tolist(), finished, routes)


class RolloutBank:
    """The bank on one rank of the rollout. Leaders of replicas read and write its files.

    A file `step_N/W-A.log` was written by replica W in the step's A-th attempt. A response may be another replica's
    after a restart, so each leader reads the files of all.
    """

    def __init__(self, folder: Path, role_groups: RoleGroups, vocab_size: int):
        """`vocab_size`: tokens that a response may have."""
        self.folder, self.role_groups = folder, role_groups
        self.vocab_size = vocab_size
        self._step: int | None = None
        self._count = 0  # responses that earlier attempts have left; the same on all ranks of a replica
        self._found: dict[str, Entry] = {}  # of them, by the identities of their requests, on the leader
        self._file: int | None = None  # descriptor; opened with the first record
        self._is_full = False  # nothing can be written in this step
        self._common = b""

    def begin_round(self, step: int, common: tuple, routes: Tensor | None):
        """Reads what earlier attempts of the step have left. A collective of the replica.

        Args:
            common: what all requests of the round depend on, as values with a `repr`.
            routes: empty routes [0, L, k]; None if responses have none.
        """
        self._common, self._routes = response_log.hash_of(repr((common, numerics())).encode()), routes
        if step == self._step:
            return
        self.close()
        self._step, self._is_full, self._found = step, False, {}
        for path in self._files_of(self.folder / step_name(step)) if self.role_groups.is_leader else ():
            try:
                if path.is_symlink():
                    raise OSError(0, "it is a link")
                entries = response_log.intact(path, functools.partial(self._warn, path))
                self._found |= {str(entry.facts.get("identity")): entry for entry in entries}
            except OSError as error:
                self._warn(path, f"is ignored: {error.strerror}")
        self._count = self.role_groups.broadcast_number(len(self._found))
        if self._count and self.role_groups.rank == self.role_groups.ranks.start:
            print(f"megarl: step {step}: {self._count} responses are in {self.folder}", file=sys.stderr, flush=True)

    def find(self, requests: Iterable[tuple[int, GenerationRequest]]) -> dict[int, Completion]:
        """The responses that the bank has, by the numbers of their requests. A collective of the replica."""
        if not self._count:
            return {}
        found = {}
        for number, request in requests if self.role_groups.is_leader else ():
            entry = self._found.get(self._identity(request))
            if entry is not None and (completion := self._read(entry, request)) is not None:
                found[number] = completion
        return self.role_groups.broadcast_object(found)

    def keep(self, request: GenerationRequest, completion: Completion):
        """Appends a response, unless a round has stopped it early. Not a collective."""
        if not self.role_groups.is_leader or self._is_full or not _is_whole(request, completion):
            return
        try:
            if self._file is None:
                self._file = self._create()
            response_log.append(self._file, pack({"identity": self._identity(request)}, completion))
        except OSError as error:
            reason = error.strerror or error
            warn([f"{self.folder}: the responses of step {self._step} are not kept: {reason}"])
            self._is_full = True

    def discard(self, run: Path):
        """Removes this replica's files of all steps up to the run's latest checkpoint. Not a collective."""
        latest = folders.named(run / "checkpoints", folders.LATEST)
        if not self.role_groups.is_leader or latest is None:
            return
        step = step_of(latest)
        for folder in self.folder.glob("step_*"):
            if 0 <= step_of(folder) <= step and folder.is_dir():
                for path in self._own_files(folder):
                    path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # other replicas still have files in it
                    folder.rmdir()
        with contextlib.suppress(OSError):  # later steps have begun
            self.folder.rmdir()

    def close(self):
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _files_of(self, folder: Path) -> list[Path]:
        files = sorted(folder.glob(f"*-*{SUFFIX}"))
        return [path for path in files if path.name.partition("-")[0].isdecimal()]

    def _own_files(self, folder: Path) -> list[Path]:
        replicas, own = len(self.role_groups.replicas), self.role_groups.dp_rank
        return [path for path in self._files_of(folder) if int(path.name.partition("-")[0]) % replicas == own]

    def _create(self) -> int:
        folder = self.folder / step_name(self._step)
        while not folder.is_dir():
            with contextlib.suppress(FileNotFoundError):  # another replica has just removed the empty bank
                folder.mkdir(parents=True, exist_ok=True)
        names = (f"{self.role_groups.dp_rank:05d}-{attempt:03d}{SUFFIX}" for attempt in itertools.count())
        path = next(path for name in names if not os.path.lexists(path := folder / name))  # others: earlier attempts
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _warn(self, path: Path, problem: str):
        warn([f"{path}: {problem}"])

    def _identity(self, request: GenerationRequest) -> str:
        named: tuple = request.key, request.max_new_tokens, request.prompt
        if request.stops is not None:  # of an agent
            named = *named, request.stops.stops
        return response_log.hash_of(self._common + repr(named).encode()).hex()

    def _read(self, entry: Entry, request: GenerationRequest) -> Completion | None:
        """What a record has; None if it is damaged, or cannot be what the engine answers to a request."""
        try:
            completion = unpack(entry.read())
            return completion if self._answers(request, completion) else None
        except (ValueError, OSError) as error:
            self._warn(entry.path, str(error))
            return None

    def _answers(self, request: GenerationRequest, completion: Completion) -> bool:
        """Whether a completion could be the engine's: whoever can write to the folder may write anything."""
        tokens, routes = completion.tokens, completion.routes
        if not 1 <= len(tokens) <= request.max_new_tokens or not _is_whole(request, completion):
            return False
        if not all(0 <= t < self.vocab_size for t in tokens) or not all(map(math.isfinite, completion.logprobs)):
            return False
        if self._routes is None or routes is None:
            return self._routes is None and routes is None
        return routes.shape == (len(request.prompt) + len(tokens), *self._routes.shape[1:])


def _is_whole(request: GenerationRequest, completion: Completion) -> bool:
    """Whether a response has come to its end, and no round has stopped it."""
    return completion.finished or len(completion.tokens) >= request.max_new_tokens


class AskedRequests:
    """What the engine takes its requests from: the rest of those that it was stopped in, then those of another source
    that no bank answers."""

    def __init__(
        self, source: RequestSource, ended: Callable[[int, Completion], object], bank: RolloutBank | None = None
    ):
        """`ended`: takes in a response, of the bank or of the engine, by the number of its request."""
        self._source, self._ended, self._bank = source, ended, bank
        self._stopped = deque[tuple[int, GenerationRequest]]()
        self._asked: dict[int, GenerationRequest] = {}  # that the engine answers, for the bank

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        """As of the source; takes in what the bank answers. A collective of the replica."""
        requests = [self._stopped.popleft() for _ in range(min(room, len(self._stopped)))]
        if len(requests) < room:
            requests += self._source.take(room - len(requests))
        if self._bank is None:
            return requests
        found = self._bank.find(requests)
        for number, completion in found.items():
            self._ended(number, completion)
        left = [(number, request) for number, request in requests if number not in found]
        self._asked |= dict(left)
        return left

    def is_empty(self) -> bool:
        return not self._stopped and self._source.is_empty()

    def wait(self):
        self._source.wait()

    def add(self, number: int, rest: GenerationRequest):
        """Has the rest of a response generated."""
        self._stopped.append((number, rest))

    def ended(self, number: int, completion: Completion):
        """Takes in a response of the engine, and keeps it in the bank."""
        if self._bank is not None:
            self._bank.keep(self._asked.pop(number), completion)
        self._ended(number, completion)
