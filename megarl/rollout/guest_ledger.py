"""The ledger between a run and its guests: replicas of its rollout that are programs of their own
(`python -m megarl.generate`), and may join, leave, stop and die while the run goes on.

The first rank of the run's rollout serves it as a store on `--replica-port`. Nothing else is shared with a guest but
the two ends of a pair, which is made for one transfer of weights and thrown away. A response depends on its request and
on the weights alone. So it does not matter who writes it, how often, and when; and nobody has to be told that its
request went to another guest.

| key | written by | what |
|---|---|---|
| `home` | run | what a guest must have in common with it, and the name of this start, with which other keys begin |
| `members`, `beat/G` | guest G | how many have come; its heartbeat, tokens of its open requests, whether it leaves |
| `front/K` | replica K of the run's rollout | what it asks for now (`Front`) |
| `request/K/I`, `lease/K/I` | run, guest | a request, and the guest that generates it: set by `compare_set` alone |
| `again/K/F/J` | run | the J-th request of the call F that is free again |
| `answers/K`, `wants/K` | guests | queues of records of responses, and of pairs for weights |

The store has no authentication, like that of the ranks: both belong on the run's own network. Records are data.
"""

import json
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from megarl.errors import UsageError
from megarl.mcore.inference.generation import GenerationRequest
from megarl.mcore.weights.reshard_plan import LocalWeights
from megarl.tool_formats.thinking_budget import ThinkingBudget

FLAG = "--join"
HOME, ENDED = "home", "ended"
PAUSE = 0.003  # seconds between two looks
LEFT = "left"  # state of a guest that takes no more requests
PATIENCE = timedelta(seconds=30)  # for one answer of the store
_PROBE = 5.0  # seconds to connect
_FIELDS = ("prompt", "key", "max_new_tokens", "written", "counted_tokens")  # of a request


class Front(NamedTuple):
    """What a replica of the run asks for."""

    weights: str = ""  # name of those that generate; "": nothing is asked for
    first: int = 0  # number of the call's first request
    posted: int = 0  # number after its last one so far
    again: int = 0  # of its requests, how often one became free again
    share: int = 0  # that a guest may run at a time
    limit: int | None = None  # new tokens of a response
    sampling: dict[str, Any] | None = None
    end_ids: tuple[int, ...] = ()


def serve(port: int) -> TCPStore:
    """The store of a ledger, in this process. UsageError if the port is not free."""
    try:
        listener = socket.create_server(("", port), backlog=1024)
    except OSError as error:
        raise UsageError(f"--replica-port {port}: {error.strerror}; allowed is a free port of this machine") from None
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=PATIENCE, master_listen_fd=listener.detach()
    )


def address_of(text: str) -> tuple[str, int]:
    """`"host:29600"` -> ("host", 29600). UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise UsageError(f"{FLAG} {text}: allowed is HOST:PORT, with the --replica-port of a run")
    return host.strip("[]"), int(port)


def find(address: str, seconds: float, goes_on: Callable[[], bool] = lambda: True) -> TCPStore | None:
    """A client of the ledger at an address; None if none answers for so long, or nothing `goes_on`. UsageError for no
    address."""
    (host, port), deadline = address_of(address), time.monotonic() + seconds
    while goes_on():
        try:
            socket.create_connection((host, port), _PROBE).close()  # torch's client would print what it cannot reach
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=PATIENCE)
        except socket.gaierror as error:
            raise UsageError(f"{FLAG} {address}: {error.strerror}") from None
        except (OSError, RuntimeError):
            if time.monotonic() > deadline:
                return None
            time.sleep(min(0.2, seconds))
    return None


class Ledger:
    """The entries of one start of a run, seen by one process; its store may be gone: RuntimeError."""

    def __init__(self, store: TCPStore, start: str):
        self.store, self.start = store, start

    def key(self, *parts: object) -> str:
        return "/".join(map(str, (self.start, *parts)))

    def set(self, value: str | bytes, *parts: object):
        self.store.set(self.key(*parts), value)  # type: ignore[arg-type]  # it takes bytes, too

    def get(self, *parts: object) -> bytes | None:
        """An entry; None: there is none."""
        key = self.key(*parts)
        return self.store.get(key) if self.store.check([key]) else None

    def is_set(self, before: str, after: str, *parts: object) -> bool:
        """Sets an entry that is `before` ("": there is none); whether it was, or is `after` already."""
        return self.store.compare_set(self.key(*parts), before, after).decode() == after

    def forget(self, *parts: object):
        self.store.delete_key(self.key(*parts))

    def push(self, item: bytes, *parts: object):
        self.store.queue_push(self.key(*parts), item)

    def pop(self, *parts: object) -> list[bytes]:
        """All that a queue has now; its only reader takes it."""
        key = self.key(*parts)
        return [self.store.queue_pop(key, False) for _ in range(self.store.queue_len(key))]

    def front(self, replica: int) -> Front:
        """What a replica of the run asks for now."""
        text = self.get("front", replica)
        return Front() if text is None else Front(*json.loads(text))

    def request(self, replica: int, number: int, thinking: ThinkingBudget | None) -> GenerationRequest | None:
        """A request; None: it has been answered. `thinking`: the budget of the run."""
        text = self.get("request", replica, number)
        if text is None:
            return None
        *values, has_budget = json.loads(text)
        options = dict(zip(_FIELDS, values, strict=True))
        return GenerationRequest(**options, thinking=thinking if has_budget else None)

    def post(self, replica: int, number: int, request: GenerationRequest):
        """Writes a request down, which has the ends and the sampling of its call."""
        values = [getattr(request, name) for name in _FIELDS]
        self.set(json.dumps([*values, request.thinking is not None]), "request", replica, number)


# -- weights -----------------------------------------------------------------------------------------------------------


def move_weights(store: TCPStore, pair: str, side: int, weights: Iterable[LocalWeights], seconds: float):
    """Sends weights from side 0 to side 1 of a pair, which have the same layout, over a group of these two processes.

    RuntimeError if the other one is gone, or does nothing for so long.
    """
    group = ProcessGroupGloo(PrefixStore(pair, store), side, 2, timedelta(seconds=seconds))
    for each in weights:
        for shard in sorted(each.description().shards):
            box = each.view(shard)
            values = box.detach().to("cpu", copy=side == 1).contiguous()
            data = [values.view(-1).view(torch.uint8)] if values.numel() else []
            for chunk in data:
                work = group.send([chunk], 1, 0) if side == 0 else group.recv([chunk], 0, 0)  # type: ignore[attr-defined]
                work.wait()
            if side == 1:
                box.copy_(values)
