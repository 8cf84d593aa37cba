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
| `request/K/I`, `lease/K/I` | run, guest | a request; guest and number of its lease, by `compare_set` alone |
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
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

from megarl.arguments import RunConfig
from megarl.checkpoint import manifest, resume
from megarl.data.detokenizer import StopMatcher
from megarl.errors import UsageError
from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.mcore.inference.generation import GenerationRequest
from megarl.mcore.weights.reshard_plan import LocalWeights
from megarl.rollout.bank import numerics
from megarl.tool_formats.thinking_budget import ThinkingBudget

FLAG = "--join"
HOME, ENDED = "home", "ended"
PAUSE = 0.003  # seconds between two looks
LEFT = "left"  # state of a guest that takes no more requests
PATIENCE = timedelta(seconds=30)  # for one answer of the store
_PROBE = 5.0  # seconds to connect
_PLAIN = (bool, int, float, str, type(None))  # values of flags
_FIELDS = ("prompt", "key", "max_new_tokens", "written", "counted_tokens")  # of a request


def facts_of(config: RunConfig) -> dict[str, Any]:
    """What a guest must have in common with a run, or has to know, as JSON."""
    rollout = config.roles["rollout"]
    sizes = parallel_sizes(rollout.megatron)
    same = {"--seed": config.settings.seed, "processor": numerics(), **resume.settings_entry(config)}
    same |= {f"package {name}": version for name, version in manifest.versions().items()}
    same |= {f"rollout {name}": value for name, value in vars(rollout.megatron).items() if isinstance(value, _PLAIN)}
    replicas = {"ranks": sizes.replica_size(), "replicas": sizes.data(len(rollout.ranks))}
    found = replicas | {"same": same, "timeout": config.settings.replica_timeout}
    return json.loads(json.dumps(found, default=str))


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


def entry(ledger: PrefixStore, key: str) -> bytes | None:
    """An entry; None: there is none. RuntimeError, as of all requests, if the store is gone."""
    return ledger.get(key) if ledger.check([key]) else None


def is_set(ledger: PrefixStore, key: str, before: str, after: str) -> bool:
    """Sets an entry that is `before` ("": there is none); whether it was, or is `after` already."""
    return ledger.compare_set(key, before, after).decode() == after


def queued(ledger: PrefixStore, key: str) -> list[bytes]:
    """All that a queue has now, taken by its only reader."""
    return [ledger.queue_pop(key, False) for _ in range(ledger.queue_len(key))]


def front_of(ledger: PrefixStore, replica: int) -> Front:
    """What a replica of the run asks for now."""
    text = entry(ledger, f"front/{replica}")
    return Front() if text is None else Front(*json.loads(text))


def post(ledger: PrefixStore, key: str, request: GenerationRequest):
    """Writes a request down; its ends and its sampling are those of the front."""
    values = [getattr(request, name) for name in _FIELDS]
    stops = None if request.stops is None else [stop.decode() for stop in request.stops.stops]
    ledger.set(key, json.dumps([*values, request.thinking is not None, stops]))


def request_of(
    ledger: PrefixStore, key: str, thinking: ThinkingBudget | None, matcher: Callable[[tuple[str, ...]], StopMatcher]
) -> GenerationRequest | None:
    """A request; None: it has been answered. `thinking`: the budget of the run; `matcher`: makes that of stop
    strings."""
    text = entry(ledger, key)
    if text is None:
        return None
    *values, has_budget, stops = json.loads(text)
    options = dict(zip(_FIELDS, values, strict=True))
    options |= {"thinking": thinking if has_budget else None, "stops": None if stops is None else matcher(tuple(stops))}
    return GenerationRequest(**options)


# -- weights -----------------------------------------------------------------------------------------------------------


def move_weights(ledger: Store, pair: str, side: int, weights: Iterable[LocalWeights], seconds: float):
    """Sends weights from side 0 to side 1 of a pair, which have the same layout, over a group of these two processes.

    RuntimeError if the other one is gone, or does nothing for so long.
    """
    group = ProcessGroupGloo(PrefixStore(pair, ledger), side, 2, timedelta(seconds=seconds))
    for each in weights:
        for shard in sorted(each.shards):
            box = each.view(shard)
            values = box.detach().to("cpu", copy=side == 1).contiguous()
            data = [values.view(-1).view(torch.uint8)] if values.numel() else []
            for chunk in data:
                work = group.send([chunk], 1, 0) if side == 0 else group.recv([chunk], 0, 0)  # type: ignore[attr-defined]
                work.wait()
            if side == 1:
                box.copy_(values)
