"""Clients that break off, and that send what is no HTTP, at every place of a request and of its answer."""

import contextlib
import json
import socket
import struct

from tests.helpers.waiting import SAFETY_SECONDS

RESET = struct.pack("ii", 1, 0)  # closing a socket with this SO_LINGER resets the connection


def requests(path: str, body: dict, key: str = "") -> dict[str, tuple[bytes, ...]]:
    """What each client sends, by its name: pieces, between which it waits for the first bytes of an answer."""
    data = json.dumps(body).encode()
    keyed = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{keyed}".encode()
    sized = head + b"Content-Length: %d\r\n" % len(data)
    whole, chunked = sized + b"\r\n" + data, head + b"Transfer-Encoding: chunked\r\n\r\n"
    return {
        "goes at once": (whole,),
        "goes while it is answered": (whole, b""),
        "goes in the middle of its body": (whole[:-1],),
        "goes in the middle of its head": (sized,),
        "sends more than it said": (whole + b"{]\xff",),
        "sends more while it is answered": (whole, b"\xff\xff\r\n\r\n"),
        "asks twice at once": (whole + whole, b""),
        "sends no chunk": (chunked + b"zz\r\n",),
        "sends no chunk after its answer": (sized + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", b"zz\r\n"),
        "wants to go on": (sized + b"Expect: 100-continue\r\n\r\n", data[:-1]),
        "wants a websocket": (sized + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n" + data,),
        "speaks another protocol": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",),
        "sends odd headers": (whole.replace(b"localhost", b"localhost\xff"),),
    }


def visit_all(port: int, path: str, body: dict, key: str = ""):
    """Each client comes twice: it closes its connection, and it resets it."""
    for pieces in requests(path, body, key).values():
        for resets in (False, True):
            visit(port, pieces, resets)


def visit(port: int, pieces: tuple[bytes, ...], resets: bool):
    """Sends the pieces, and closes or resets the connection."""
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(SAFETY_SECONDS)
        for number, piece in enumerate(pieces):
            if number:
                client.recv(100)
            client.sendall(piece)
        if resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
