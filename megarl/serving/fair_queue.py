"""The requests that wait for a replica: clients take turns, so that none waits for all requests of another one."""

import collections
import contextvars

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
