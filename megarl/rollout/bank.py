"""Finished responses of the running steps on disk (`--rollout-bank`), so that a killed run generates only the rest.

Each replica appends the responses that it finishes to a file of its own. After a restart a response is used again if
its request is exactly the same: policy, prompt, random stream, sampling, and everything that may change rounding.
A response depends on nothing else, so the run's results are those of a run without interruption.

A turn of an episode or of an agent is a response to all tokens before it. So a run that was killed plays its episodes
again, with the answers of their environments from the journal, and generates only the turns that are not here.
"""

import contextlib
import functools
import itertools
import math
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.checkpoint import folders
from megarl.comm.role_mesh import RoleGroups
from megarl.errors import warn
from megarl.mcore import device
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.observe.files import step_name, step_of
from megarl.rollout import response_log
from megarl.rollout.requests import RoundRequests
from megarl.rollout.response_log import SUFFIX, DamagedRecord, Entry, Record

NOBODY = 1 << 40  # stands for the dp rank of a response that no replica has


def numerics() -> tuple:
    """What changes the rounding of a forward pass besides model and layout."""
    processor = torch.cuda.get_device_name() if device.has_cuda() else torch.backends.cpu.get_cpu_capability()
    return torch.__version__, platform.machine(), processor


def pack(identity: str, number: int, completion: Completion) -> bytes:
    """The record of a response. `identity`: of its request; `number`: its sequence id in the round."""
    fields = {
        "tokens": torch.tensor(completion.tokens, dtype=torch.int32),
        "rollout_logprobs": torch.tensor(completion.logprobs, dtype=torch.float32),
    }
    if completion.routes is not None:
        fields["routes"] = completion.routes.cpu()
    facts = {"identity": identity, "number": number, "finished": completion.finished}
    return response_log.packed(facts, fields)


def unpack(record: Record) -> Completion:
    """The response of a record. DamagedRecord if it holds none."""
    fields, finished = record.fields, record.facts.get("finished")
    tokens, logprobs, routes = (fields.get(name) for name in ("tokens", "rollout_logprobs", "routes"))
    if tokens is None or logprobs is None or not isinstance(finished, bool):
        raise DamagedRecord("it holds no response")
    kinds = (tokens.dtype, logprobs.dtype, None if routes is None else routes.dtype)
    if kinds not in ((torch.int32, torch.float32, of_routes) for of_routes in (None, torch.int16)):
        raise DamagedRecord("its types do not fit")
    if tokens.dim() != 1 or logprobs.shape != tokens.shape:
        raise DamagedRecord("its sizes do not fit")
    return Completion(tokens.tolist(), logprobs.tolist(), finished, routes)


class RolloutBank:
    """The bank on one rank of the rollout. Replica leaders read and write files; methods are collectives of the role.

    A file `step_N/W-A.log` was written by replica W in the step's A-th attempt. Replica R of n reads the files with
    W mod n = R, so no two replicas read the same file, and all files are read in any layout.
    """

    def __init__(self, folder: Path, role_groups: RoleGroups, vocab_size: int):
        """`vocab_size`: tokens that a response may have."""
        self.folder, self.role_groups = folder, role_groups
        self.vocab_size = vocab_size
        self._step: int | None = None
        self._found: list[Entry] = []  # by earlier attempts, of this replica's files
        self._file: int | None = None  # descriptor; opened with the first record
        self._is_full = False  # nothing can be written in this step
        self._requests: RoundRequests | None = None
        self._common = b""

    def take(self, step: int, requests: RoundRequests, common: tuple, routes: torch.Tensor | None, whole_groups: bool):
        """This replica's responses from the bank by sequence id; marks those of all replicas in `requests`.

        Args:
            common: what all requests of the round depend on, as values with a `repr`.
            routes: empty routes [0, L, k]; None if responses have none.
            whole_groups: the rest of a group is then generated where its banked responses are.
        """
        self._requests = requests
        self._set_common(common, routes)
        if step != self._step:
            self._begin(step)
        found = self._matching() if self.role_groups.is_leader else []
        completions: dict[int, Completion] = {}
        for number, completion in self.role_groups.broadcast_object(found):
            completions.setdefault(number, completion)
        owners = torch.full((len(requests),), NOBODY, dtype=torch.int64, device=device.device())
        owners[list(completions)] = self.role_groups.dp_rank
        dist.all_reduce(owners, op=dist.ReduceOp.MIN, group=self.role_groups.pg_collection.dp)
        owners = owners.cpu()
        if whole_groups:
            owner_of_group = requests.groups.reduce(owners, "amin")
            owners[owners != requests.groups.expand(owner_of_group)] = NOBODY
            requests.bind({group: rank for group, rank in enumerate(owner_of_group.tolist()) if rank != NOBODY})
        requests.banked = (owners != NOBODY).tolist()
        count = sum(requests.banked)
        if count:
            total = sum(limit > 0 for limit in requests.limits)
            self._say(f"{count} of {total} responses")
        return {i: c for i, c in sorted(completions.items()) if owners[i] == self.role_groups.dp_rank}

    def _say(self, what: str):
        """On the role's first rank, says what the bank has of the step."""
        if self.role_groups.rank == self.role_groups.ranks.start:
            print(f"megarl: step {self._step}: {what} are in {self.folder}", file=sys.stderr, flush=True)

    def add(self, number: int, completion: Completion):
        """Appends a response of the round of the last `take`, unless it was stopped early. Not a collective."""
        if self._writes:
            (request,) = self._requests.build([number])
            self._append(request, number, completion)

    @property
    def _writes(self) -> bool:
        return self.role_groups.is_leader and not self._is_full

    def _append(self, request: GenerationRequest, number: int, completion: Completion):
        if not completion.finished and len(completion.tokens) < request.max_new_tokens:
            return
        try:
            if self._file is None:
                self._file = self._create()
            response_log.append(self._file, pack(self._identity(request), number, completion))
        except OSError as error:
            reason = error.strerror or error
            warn([f"--rollout-bank {self.folder}: the responses of step {self._step} are not kept: {reason}"])
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

    def _set_common(self, common: tuple, routes: torch.Tensor | None):
        """`common`, `routes`: as of `take`."""
        self._common, self._routes = response_log.hash_of(repr((common, numerics())).encode()), routes

    def _begin(self, step: int):
        """Closes the file of the last step and looks for records of earlier attempts."""
        self.close()
        self._step, self._found = step, []
        self._is_full = False
        if not self.role_groups.is_leader:
            return
        for path in self._files_to_read(self._folder_of(step)):
            try:
                if path.is_symlink():
                    raise OSError(0, "it is a link")
                self._found += response_log.intact(path, functools.partial(self._warn, path))
            except OSError as error:
                self._warn(path, f"is ignored: {error.strerror}")

    def _warn(self, path: Path, problem: str):
        warn([f"--rollout-bank {path}: {problem}"])

    def close(self):
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _folder_of(self, step: int) -> Path:
        return self.folder / step_name(step)

    def _files_to_read(self, folder: Path) -> list[Path]:
        return self._own_files(folder)

    def _all_files(self, folder: Path) -> list[Path]:
        files = sorted(folder.glob(f"*-*{SUFFIX}"))
        return [path for path in files if path.name.partition("-")[0].isdecimal()]

    def _own_files(self, folder: Path) -> list[Path]:
        replicas, own = len(self.role_groups.replicas), self.role_groups.dp_rank
        return [path for path in self._all_files(folder) if int(path.name.partition("-")[0]) % replicas == own]

    def _create(self) -> int:
        folder = self._folder_of(self._step)
        folder.mkdir(parents=True, exist_ok=True)
        for attempt in itertools.count():
            path = folder / f"{self.role_groups.dp_rank:05d}-{attempt:03d}{SUFFIX}"
            try:
                return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
            except FileExistsError:  # of an earlier attempt
                continue
        raise AssertionError("counting never ends")

    def _identity(self, request: GenerationRequest) -> str:
        named: tuple = request.key, request.max_new_tokens, request.prompt
        if request.stops is not None:  # of an agent
            named = *named, request.stops.stops
        return response_log.hash_of(self._common + repr(named).encode()).hex()

    def _matching(self) -> list[tuple[int, Completion]]:
        """What the bank has for requests of this round, by their numbers; keeps the other records for later rounds."""
        found, left = [], []
        for entry in self._found:
            number = entry.facts.get("number")
            request = self._request(number)
            if request is None or self._identity(request) != entry.facts.get("identity"):
                left.append(entry)
                continue
            if (completion := self._read(entry, request)) is not None:
                found.append((number, completion))
        self._found = left
        return found

    def _request(self, number: Any) -> GenerationRequest | None:
        """A request that this replica may take, with tokens left to generate; None if the number names none."""
        requests = self._requests
        if not isinstance(number, int) or not 0 <= number < len(requests) or not requests.limits[number]:
            return None
        if requests.prompt_of(number).dp_rank not in (None, self.role_groups.dp_rank):
            return None
        return requests.build([number])[0]

    def _read(self, entry: Entry, request: GenerationRequest) -> Completion | None:
        """What a record has; None if it is damaged, or cannot be what the engine answers to a request."""
        try:
            completion = unpack(entry.read())
            return completion if self._answers(request, completion) else None
        except (DamagedRecord, OSError) as error:
            self._warn(entry.path, str(error))
            return None

    def _answers(self, request: GenerationRequest, completion: Completion) -> bool:
        """Whether a completion could be the engine's: whoever can write to the folder may write anything."""
        tokens, routes = completion.tokens, completion.routes
        if not 1 <= len(tokens) <= request.max_new_tokens or not all(0 <= t < self.vocab_size for t in tokens):
            return False
        if not completion.finished and len(tokens) < request.max_new_tokens:
            return False
        if not all(map(math.isfinite, completion.logprobs)):
            return False
        if self._routes is None or routes is None:
            return self._routes is None and routes is None
        return routes.shape == (len(request.prompt) + len(tokens), *self._routes.shape[1:])


class TurnBank(RolloutBank):
    """The bank on one rank of the rollout.

    An episode may run on another replica after a restart, so each leader reads the files of all replicas.
    """

    _count = 0  # turns that earlier attempts have left; the same on all ranks of a replica
    _by_identity: dict[str, Entry]  # of them, on the leader

    def begin_round(self, step: int, common: tuple, routes: Tensor | None):
        """Reads what earlier attempts of the step have left. Arguments as of `take`. A collective of the replica."""
        self._set_common(common, routes)
        if step == self._step:
            return
        self._begin(step)
        self._by_identity, self._found = {str(entry.facts.get("identity")): entry for entry in self._found}, []
        self._count = self.role_groups.broadcast_number(len(self._by_identity))
        if self._count:
            self._say(f"{self._count} turns")

    def _files_to_read(self, folder: Path) -> list[Path]:
        return self._all_files(folder)

    def find(self, requests: Iterable[tuple[int, GenerationRequest]]) -> dict[int, Completion]:
        """The turns that the bank has, by the numbers of their requests. A collective of the replica."""
        if not self._count:
            return {}
        found = {}
        for number, request in requests if self.role_groups.is_leader else ():
            entry = self._by_identity.get(self._identity(request))
            if entry is not None and (completion := self._read(entry, request)) is not None:
                found[number] = completion
        return self.role_groups.broadcast_object(found)

    def keep(self, request: GenerationRequest, completion: Completion):
        """Appends a turn, unless a round has cut it. Not a collective."""
        if self._writes:
            self._append(request, 0, completion)
