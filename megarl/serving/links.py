"""The connections between the HTTP process and the leaders of the replicas, and what is said on them.

A message is an object with "type". From the HTTP process to all ranks of a replica:

- generate: id, prompt, key, max_tokens, temperature, greedy, top_k, top_p, min_p, end_ids, stops, thinking (None, or
  limit, tokens, format), top_logprobs, routes
- score: id, tokens, temperature, top_logprobs
- abort: ids
- control: number, command ("pause" with mode, "resume", "weights" with path)
- stop

From a leader to the HTTP process:

- ready, the first one: replica, max_requests, capacity, blocks (free ones of the cache), version, label
- tokens: version, blocks, events ([id, tokens, logprobs, top, finish], `finish` with the last one)
- scores: id, logprobs, top, version
- routes: id, shape, data (before the last tokens)
- refused: id, message
- control: number, error, version, label
- window: open, version, label (the policy of a training run)
- drain: the server is to end when its requests have
"""

import contextlib
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from multiprocessing.context import AuthenticationError
from typing import Any

HANDSHAKE_SECONDS = 30.0

_MAX_PACKET_BYTES = 256 * 2**20
_MAX_HANDSHAKES = 64  # at once

Message = dict[str, Any]
Address = str | tuple[str, int]  # the path of a Unix socket, or host and port

log = logging.getLogger(__name__)


class Link:
    """One end of a connection. A thread writes, so a slow peer makes nobody wait who sends.

    A packet is a JSON list of messages, never a pickled object, so a peer cannot make this process run anything. All
    messages that wait go in one packet: in a busy process the thread gets the interpreter seldom.
    """

    def __init__(self, connection: Connection):
        """Takes over a connection whose peer has shown that it knows the key."""
        self._connection, self._socket = connection, _socket_of(connection)
        if self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def send(self, message: Message):
        """Sends a message without waiting. If the peer is gone, only `receive` says so."""
        self._unsent.put(json.dumps(message, separators=(",", ":")).encode())

    def receive(self, seconds: float | None = None) -> list[Message]:
        """The messages that have come, after waiting up to `seconds` for the first; None: without a limit.

        A packet that has begun to come is awaited. ConnectionError when the peer is gone, or sends something else.
        """
        messages: list[Message] = []
        try:
            while self._connection.poll(0.0 if messages else seconds):
                packet = json.loads(self._connection.recv_bytes(_MAX_PACKET_BYTES))
                if not isinstance(packet, list) or not all(isinstance(m, dict) and "type" in m for m in packet):
                    raise ValueError
                messages += packet
        except (ValueError, RecursionError):
            raise ConnectionError("it sent what is no message") from None
        except (EOFError, OSError) as error:
            if not messages:  # else the next call finds it again
                raise ConnectionError(str(error) or "it closed the connection") from None
        return messages

    def close(self, seconds: float = 0.0):
        """Closes the connection when all has been sent, or after so many seconds; wakes up who receives."""
        self._unsent.put(None)
        self._writer.join(seconds)
        with contextlib.suppress(OSError):  # the peer has closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self):
        with contextlib.suppress(OSError):  # `receive` finds the end, too
            while True:
                waiting = [self._unsent.get()]
                while not self._unsent.empty():
                    waiting.append(self._unsent.get())
                if data := [each for each in waiting if each is not None]:
                    self._connection.send_bytes(b"[%b]" % b",".join(data))
                if None in waiting:
                    return


def connect(address: Address, key: bytes) -> Connection:
    """A leader's connection with the HTTP process.

    Raises:
        ConnectionError: nobody listens there, does not know the key, or does not answer in HANDSHAKE_SECONDS.
    """
    try:
        connection = Client(address)
        with _deadline(connection):
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
    except (OSError, EOFError, AuthenticationError) as error:
        raise ConnectionError(f"no HTTP process that knows the key answers at {address}: {error!r}") from None
    return connection


def accept_all(listener: Listener, key: bytes, connected: Callable[[Connection], None]):
    """Accepts connections for ever; calls `connected` with each one whose peer knows the key, in a thread of its own.

    Strangers get nothing, and keep nobody waiting who comes after them.
    """
    free = threading.Semaphore(_MAX_HANDSHAKES)

    def check(connection: Connection):
        try:
            with _deadline(connection):
                deliver_challenge(connection, key)
                answer_challenge(connection, key)
        except (OSError, EOFError, AuthenticationError) as error:
            log.warning("a connection of the ranks was refused: %r", error)
            return
        finally:
            free.release()
        connected(connection)

    while True:
        free.acquire()
        try:
            threading.Thread(target=check, args=[listener.accept()], daemon=True).start()
        except OSError:  # the peer is gone already, or clients have taken all file descriptors
            free.release()
            time.sleep(0.1)


@contextlib.contextmanager
def _deadline(connection: Connection) -> Iterator[None]:
    """Ends the connection if the context lasts longer than HANDSHAKE_SECONDS, and if it raises."""
    with _socket_of(connection) as peer:
        timer = threading.Timer(HANDSHAKE_SECONDS, peer.shutdown, [socket.SHUT_RDWR])
        timer.daemon = True
        timer.start()
        try:
            yield
        except BaseException:
            connection.close()
            raise
        finally:
            timer.cancel()


def _socket_of(connection: Connection) -> socket.socket:
    """A second handle of a connection's socket. Closing a descriptor wakes up no thread that reads; `shutdown` does."""
    return socket.socket(fileno=os.dup(connection.fileno()))
