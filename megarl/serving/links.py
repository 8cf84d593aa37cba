"""The connections between an HTTP process and the leaders of the replicas.

A message is a NamedTuple: of `replica_messages.py`, or of the sessions of environments. On the wire it is JSON, a list
of the name of its class and its fields, and never a pickled object, so a peer cannot make this process run anything.
"""

import asyncio
import contextlib
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from multiprocessing.context import AuthenticationError
from types import UnionType
from typing import Any, get_args

HANDSHAKE_SECONDS = 30.0

_MAX_PACKET_BYTES = 256 * 2**20
MAX_HANDSHAKES = 64  # at once

Message = Any  # a NamedTuple whose fields JSON can hold, or are dataclasses of such fields
Kinds = Mapping[str, Callable[[list], Message]]  # what makes a message of its fields, by the name of its class
Address = str | tuple[str, int]  # the path of a Unix socket, or host and port

log = logging.getLogger(__name__)


def kinds_of(union: UnionType) -> Kinds:
    """The messages of a union, which are made of their fields as they are."""
    return {each.__name__: each._make for each in get_args(union)}


def packet(messages: Iterable[bytes]) -> bytes:
    """Encoded messages as one text."""
    return b"[%b]" % b",".join(messages)


def encode(message: Message) -> bytes:
    """A message as JSON."""
    return json.dumps([type(message).__name__, *message], separators=(",", ":"), default=vars).encode()


def decode(data: bytes, kinds: Kinds) -> list[Message]:
    """The messages of a packet. ValueError or RecursionError for what is none."""
    found = json.loads(data)
    if not isinstance(found, list):
        raise ValueError("no list of messages")
    try:
        return [kinds[name](fields) for name, *fields in found]
    except (TypeError, LookupError) as error:
        raise ValueError(f"no message: {error}") from None


class Link:
    """One end of a connection. A thread writes, so a slow peer makes nobody wait who sends.

    All messages that wait go in one packet: in a busy process the thread gets the interpreter seldom.
    """

    def __init__(self, connection: Connection, kinds: Kinds):
        """Takes over a connection whose peer has shown that it knows the key. `kinds`: what it may send."""
        self._connection, self._socket, self._kinds = connection, _socket_of(connection), kinds
        if self._socket.family != socket.AF_UNIX:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unsent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def send(self, message: Message):
        """Sends a message without waiting. If the peer is gone, only `receive` says so."""
        self._unsent.put(encode(message))

    def receive(self, seconds: float | None = None) -> list[Message]:
        """What has come, after waiting up to `seconds` for the first; a packet that has begun to come is awaited.

        ConnectionError when the peer is gone, or sends something else.
        """
        messages: list[Message] = []
        try:
            while self._connection.poll(0.0 if messages else seconds):
                messages += decode(self._connection.recv_bytes(_MAX_PACKET_BYTES), self._kinds)
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
                    self._connection.send_bytes(packet(data))
                if None in waiting:
                    return


def connect(address: Address, key: bytes) -> Connection:
    """A leader's connection. ConnectionError if nobody who knows the key answers in HANDSHAKE_SECONDS."""
    try:
        connection = Client(address)
        with _deadline(connection):
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
    except (OSError, EOFError, AuthenticationError) as error:
        raise ConnectionError(f"no HTTP process that knows the key answers at {address}: {error!r}") from None
    return connection


def follow_all(
    listener: Listener, key: bytes, kinds: Kinds, received: Callable[[Link, list[Message] | ConnectionError], None]
):
    """Accepts the connections of leaders for ever, in a thread, and follows each one in a thread of its own.

    `received` runs on the loop that runs now, with a link and what has come; at last the reason why no more does.
    """
    loop = asyncio.get_running_loop()

    def follow(connection: Connection):
        link = Link(connection, kinds)
        came: list[Message] | ConnectionError = []
        while not isinstance(came, ConnectionError):
            try:
                came = link.receive()
            except ConnectionError as error:
                came = error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(received, link, came)

    threading.Thread(target=accept_all, args=[listener, key, follow], daemon=True).start()


def accept_all(listener: Listener, key: bytes, connected: Callable[[Connection], None]):
    """Accepts connections for ever; calls `connected` with each one whose peer knows the key, in a thread of its own.

    Strangers get nothing, and keep nobody waiting who comes after them.
    """
    free = threading.Semaphore(MAX_HANDSHAKES)

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
