"""The wire between the HTTP process and the leaders of the replicas: frames, the mutual handshake, and both ends.

A frame is 4 bytes of big-endian length and a JSON object with "type". The handshake proves to each side that the other
one knows the key, without sending it: the frontend sends 16 random bytes F, the leader answers with 16 random bytes L
and HMAC-SHA256(key, "leader" F L), the frontend with HMAC-SHA256(key, "frontend" F L).
"""

import asyncio
import collections
import hashlib
import hmac
import json
import secrets
import select
import socket
import time
from typing import Any

LARGEST_FRAME = 256 * 2**20  # bytes
HANDSHAKE_SECONDS = 30.0

_NONCE, _DIGEST, _HEADER = 16, 32, 4
_READ = 2**18  # bytes per call of recv

Frame = dict[str, Any]


def encode_frame(frame: Frame) -> bytes:
    """The bytes of a frame with its length; ValueError for one longer than LARGEST_FRAME."""
    body = json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    if len(body) > LARGEST_FRAME:
        raise ValueError(f"a frame of {len(body)} bytes: at most {LARGEST_FRAME} are allowed")
    return len(body).to_bytes(_HEADER, "big") + body


def decode_body(body: bytes) -> Frame:
    """The frame of the bytes after the length; ConnectionError if the peer does not speak this protocol."""
    try:
        frame = json.loads(body.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        raise ConnectionError("the peer sent a frame that is no JSON") from None
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise ConnectionError('the peer sent a frame that is no object with "type"')
    return frame


def body_length(header: bytes | bytearray) -> int:
    """Bytes that follow the 4 bytes of `header`; ConnectionError for more than LARGEST_FRAME."""
    length = int.from_bytes(header, "big")
    if length > LARGEST_FRAME:
        raise ConnectionError(f"the peer announced a frame of {length} bytes: at most {LARGEST_FRAME} are allowed")
    return length


class FrameBuffer:
    """Cuts a stream of bytes into frames; takes what comes, in any pieces, in time linear in the bytes."""

    def __init__(self):
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes, in order. Raises ConnectionError (see `decode_body`)."""
        self._bytes += data
        frames, start = [], 0
        while len(self._bytes) - start >= _HEADER:
            begin = start + _HEADER
            end = begin + body_length(self._bytes[start:begin])
            if end > len(self._bytes):
                break
            frames.append(decode_body(bytes(self._bytes[begin:end])))
            start = end
        del self._bytes[:start]
        return frames


def _proof(key: bytes, side: bytes, frontend: bytes, leader: bytes) -> bytes:
    return hmac.digest(key, side + frontend + leader, hashlib.sha256)


class LeaderLink:
    """A leader's end: never blocks unless told how long, so that a step of the engine never waits for the frontend.

    For one thread at a time.

    Every method raises ConnectionError once the frontend is gone.
    """

    def __init__(self, connected: socket.socket):
        connected.setblocking(False)
        self._socket = connected
        self._unsent: collections.deque[memoryview] = collections.deque()
        self._buffer = FrameBuffer()

    @classmethod
    def connect(cls, address: str | tuple[str, int], key: bytes, timeout: float = HANDSHAKE_SECONDS) -> "LeaderLink":
        """Connects and shakes hands. ConnectionError if the frontend does not know the key or does not answer.

        Args:
            address: the path of a Unix socket, or (host, port).
            key: 32 bytes, those of the frontend's configuration.
            timeout: seconds for all of it.
        """
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        if not isinstance(address, str) and ":" in address[0]:
            family = socket.AF_INET6
        connected = socket.socket(family, socket.SOCK_STREAM)
        try:
            connected.settimeout(timeout)
            connected.connect(address)
            if family != socket.AF_UNIX:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = secrets.token_bytes(_NONCE)
            theirs = _receive_exactly(connected, _NONCE)
            connected.sendall(nonce + _proof(key, b"leader", theirs, nonce))
            if not hmac.compare_digest(_receive_exactly(connected, _DIGEST), _proof(key, b"frontend", theirs, nonce)):
                raise ConnectionError("the frontend does not know the key")
        except TimeoutError:
            connected.close()
            raise ConnectionError(f"the frontend has not answered in {timeout:.0f} seconds") from None
        except BaseException:
            connected.close()
            raise
        return cls(connected)

    def fileno(self) -> int:
        """The socket's file descriptor, for `select`; -1 after `close`."""
        return self._socket.fileno()

    @property
    def unsent(self) -> int:
        """Bytes that the socket has not taken yet."""
        return sum(map(len, self._unsent))

    def send(self, frame: Frame):
        """Appends a frame to what is to be sent, and sends what the socket takes at once."""
        self._unsent.append(memoryview(encode_frame(frame)))
        self._write()

    def receive(self, timeout: float) -> list[Frame]:
        """The frames that have arrived, after waiting at most `timeout` seconds for the first; also sends meanwhile."""
        end = time.monotonic() + timeout
        while True:
            self._write()
            frames = self._read()
            remaining = end - time.monotonic()
            if frames or remaining <= 0:
                return frames
            self._wait(remaining)

    def flush(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds until the socket has taken all; returns whether it has."""
        end = time.monotonic() + timeout
        while True:
            self._write()
            remaining = end - time.monotonic()
            if not self._unsent or remaining <= 0:
                return not self._unsent
            select.select([], [self._socket], [], remaining)

    def close(self):
        """Closes the socket; what is unsent is lost."""
        self._unsent.clear()
        self._socket.close()

    def _wait(self, timeout: float):
        select.select([self._socket], [self._socket] if self._unsent else [], [], timeout)

    def _write(self):
        while self._unsent:
            try:
                taken = self._socket.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionError(f"the frontend is gone: {error.strerror}") from None
            rest = self._unsent.popleft()[taken:]
            if rest:
                self._unsent.appendleft(rest)

    def _read(self) -> list[Frame]:
        """All complete frames that can be read at once; the end of the stream counts when no frame came before it."""
        frames: list[Frame] = []
        while True:
            try:
                data = self._socket.recv(_READ)
            except BlockingIOError:
                return frames
            except OSError as error:
                raise ConnectionError(f"the frontend is gone: {error.strerror}") from None
            if not data:
                if frames:
                    return frames
                raise ConnectionError("the frontend is gone: it closed the connection")
            frames += self._buffer.feed(data)


def _receive_exactly(connected: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connected.recv(count - len(data))
        if not piece:
            raise ConnectionError("the frontend closed the connection during the handshake")
        data += piece
    return data


class FrontendLink:
    """The frontend's end of one leader's connection, for asyncio."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    @classmethod
    async def accept(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> "FrontendLink":
        """Shakes hands with a peer that has connected. ConnectionError, with the connection closed, if it does not know
        the key or does not answer in HANDSHAKE_SECONDS."""
        nonce = secrets.token_bytes(_NONCE)
        try:
            writer.write(nonce)
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                answer = await reader.readexactly(_NONCE + _DIGEST)
            theirs, proof = answer[:_NONCE], answer[_NONCE:]
            if not hmac.compare_digest(proof, _proof(key, b"leader", nonce, theirs)):
                raise ConnectionError("a peer does not know the key")
            writer.write(_proof(key, b"frontend", nonce, theirs))
        except (asyncio.IncompleteReadError, TimeoutError):
            writer.close()
            raise ConnectionError("a peer has not finished the handshake") from None
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer)

    def send(self, frame: Frame):
        """Sends a frame without waiting; what the socket does not take stays in memory."""
        self._writer.write(encode_frame(frame))

    async def receive(self) -> Frame:
        """The next frame; ConnectionError when the leader is gone."""
        try:
            header = await self._reader.readexactly(_HEADER)
            return decode_body(await self._reader.readexactly(body_length(header)))
        except asyncio.IncompleteReadError:
            raise ConnectionError("the leader closed the connection") from None

    async def flush(self):
        """Waits until little of what was sent is in this process's memory. ConnectionError when the leader is gone."""
        await self._writer.drain()

    def close(self):
        """Closes the connection after what was sent."""
        self._writer.close()
