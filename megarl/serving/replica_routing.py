"""Whose request is next, and which replica takes it.

Clients take turns, so that none waits for all requests of another one. A request goes to the replica of its session,
then to the one that knows most of its prompt, then to the least busy one.
"""

import collections
import contextvars
from collections.abc import Mapping, Sequence

BLOCK = 16  # tokens of a prompt that are compared together
MAX_SESSIONS, MAX_BLOCKS = 2**16, 2**18  # that are remembered

_IMBALANCE = 32  # further requests that a replica may have before its known prompts no longer attract more

client: contextvars.ContextVar[bytes] = contextvars.ContextVar("client", default=b"")
"""Whose HTTP request the running task answers: the hash of its API key, or its address."""


class FairQueue[T]:
    """Requests by id. Each client's go out in their order; one of each client in turn."""

    def __init__(self):
        self._of_client: collections.OrderedDict[bytes, dict[int, T]] = collections.OrderedDict()
        self._client_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._client_of)

    def add(self, number: int, request: T):
        """Puts a request of the running task's client behind the others of this client."""
        self._client_of[number] = client.get()
        self._of_client.setdefault(client.get(), {})[number] = request

    def pop(self) -> tuple[int, T]:
        """The next request and its id; StopIteration if there is none."""
        name, requests = next(iter(self._of_client.items()))
        number, request = next(iter(requests.items()))
        self._of_client.move_to_end(name)
        self.discard(number)
        return number, request

    def discard(self, number: int):
        """Takes a request out if it waits."""
        name = self._client_of.pop(number, None)
        if name is not None:
            del self._of_client[name][number]
            if not self._of_client[name]:
                del self._of_client[name]


class ReplicaRouter:
    """Remembers which replica has seen which sessions and prompts; its memory is bounded."""

    def __init__(self):
        self._sessions: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._blocks: collections.OrderedDict[int, int] = collections.OrderedDict()  # hash -> bits of replicas

    def choose(self, prompt: Sequence[int], session: str | None, outstanding: Mapping[int, int]) -> int:
        """The replica for a request; remembers it. `outstanding`: requests of each replica that has room."""
        hashes = _block_hashes(prompt)
        chosen = self._sessions.get(session) if session is not None else None
        if chosen is None or chosen not in outstanding:
            chosen = self._by_prompt(hashes, outstanding)
        for each in hashes:
            self._blocks[each] = self._blocks.pop(each, 0) | 1 << chosen
        if session is not None:
            self._sessions.pop(session, None)
            self._sessions[session] = chosen
        while len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)
        return chosen

    def forget(self):
        """Forgets prompts, when new weights have emptied the caches."""
        self._blocks.clear()

    def _by_prompt(self, hashes: Sequence[int], outstanding: Mapping[int, int]) -> int:
        min_outstanding = min(outstanding.values())
        candidates = {number for number, count in outstanding.items() if count - min_outstanding <= _IMBALANCE}
        bits = sum(1 << number for number in candidates)
        for each in hashes:
            known = bits & self._blocks.get(each, 0)
            if not known:
                break
            bits = known
        return min((number for number in candidates if bits >> number & 1), key=lambda n: (outstanding[n], n))


def _block_hashes(prompt: Sequence[int]) -> list[int]:
    hashes, previous = [], 0
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        previous = hash((previous, *prompt[start : start + BLOCK]))
        hashes.append(previous)
    return hashes
