"""Messages between ranks through the process group's store: what no collective has to carry.

A sender never waits, so it may be any number of messages ahead of its receivers. Anyone who reaches the store's port
can write to it, so messages are plain JSON.
"""

import json
from collections.abc import Collection
from typing import Any

import torch.distributed as dist


class _Queue:
    def __init__(self, name: str):
        """`name`: unique in the program."""
        self._prefix, self._store = f"megarl/{name}", dist.distributed_c10d._get_default_store()
        self._count = 0  # messages that this rank has taken, or as their only sender sent

    def has_next(self) -> bool:
        """Whether `take` would return at once. For receivers."""
        return self._store.check([self._key(self._count + 1)])

    def wait(self):
        """Waits for the next message. DistStoreError if none comes within the store's time-out. For receivers."""
        self._store.wait([self._key(self._count + 1)])

    def _take(self) -> tuple[str, dict[str, Any]]:
        """(key, content) of the next message; waits for it. RuntimeError: it is damaged."""
        self.wait()
        self._count += 1
        key = self._key(self._count)
        try:
            return key, json.loads(self._store.get(key))
        except (ValueError, RecursionError) as error:
            raise RuntimeError(f"the message {key} is damaged: {error}") from None

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}"


class Announcements(_Queue):
    """A queue with one sender, from which each receiver takes every message, in order."""

    def __init__(self, name: str, sender: int, receivers: Collection[int]):
        """`name`: unique in the program; `sender`, `receivers`: world ranks."""
        super().__init__(name)
        self._receivers = len(receivers)
        self.sends = dist.get_rank() == sender and len(receivers) > 0  # whether `send` does anything on this rank
        self._progress_key = f"{self._prefix}/progress"

    def send(self, message: dict[str, Any]):
        """Sends a message; other ranks than the sender return at once, and so does a sender without receivers."""
        if self.sends:
            self._count += 1
            self._store.set(self._key(self._count), json.dumps(message))

    def take(self) -> dict[str, Any]:
        """The next message, for receivers; waits for it. Errors as of `wait`, and RuntimeError: it is damaged."""
        key, message = self._take()
        if self._store.add(f"{key}/taken", 1) == self._receivers:
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/taken")
        return message

    def set_progress(self, number: int):
        """Says how far the sender is, ahead of the next message; other ranks than the sender return at once."""
        if self.sends:
            self._store.set(self._progress_key, str(number))

    def progress(self) -> int:
        """How far the sender is by now; waits until it has said so."""
        return int(self._store.get(self._progress_key))


class MessageQueue(_Queue):
    """A queue with any number of senders and one receiver, which takes each message once, in the order of sending."""

    def send(self, message: dict[str, Any]):
        """Sends a message. The store refuses one of more than 8 MiB."""
        number = self._store.add(f"{self._prefix}/sent", 1)
        self._store.set(self._key(number), json.dumps(message, separators=(",", ":")))

    def take(self) -> dict[str, Any]:
        """The next message; waits for it. RuntimeError: it is damaged."""
        key, message = self._take()
        self._store.delete_key(key)
        return message

    def close(self):
        """Removes the queue from the store; the receiver calls it after the last message that anyone sends."""
        self._store.delete_key(f"{self._prefix}/sent")
