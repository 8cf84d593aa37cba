"""Messages, the handshake, strangers, and what both ends do when the other one is gone."""

import contextlib
import queue
import socket
import threading
from multiprocessing.connection import Client, Listener
from typing import NamedTuple

import pytest

from megarl.serving import links
from tests.helpers.waiting import SAFETY_SECONDS

KEY = bytes(range(32))


class Said(NamedTuple):
    text: str
    more: list = []  # never changed


class Numbers(NamedTuple):
    n: list


KINDS = links.kinds_of(Said | Numbers)
MESSAGES = [Said("é\U0001f600\ud800"), Numbers([-(2**63), 1.5, None, float("-inf")])]


class EndingListener(Listener):
    """A listener whose next connection ends the thread that accepts, once it is to end."""

    ends = False

    def accept(self):
        connection = super().accept()
        if self.ends:
            raise SystemExit
        return connection


@pytest.fixture(params=["AF_UNIX", "AF_INET"])
def listening(request, tmp_path):
    """(address, queue of the connections that were accepted)."""
    path = str(tmp_path / "s") if request.param == "AF_UNIX" else ("127.0.0.1", 0)
    accepted = queue.SimpleQueue()
    with EndingListener(path, backlog=128) as listener:

        def accept():
            with contextlib.suppress(SystemExit):
                links.accept_all(listener, KEY, accepted.put)

        thread = threading.Thread(target=accept)
        thread.start()
        yield listener.address, accepted
        listener.ends = True
        Client(listener.address).close()
        thread.join()


@contextlib.contextmanager
def pair(listening):
    """The links of a leader and of the HTTP process."""
    address, accepted = listening
    ends = links.Link(links.connect(address, KEY), KINDS), links.Link(accepted.get(timeout=SAFETY_SECONDS), KINDS)
    yield ends
    for end in ends:
        end.close()


def receive(link, count):
    found = []
    while len(found) < count:
        found += link.receive(SAFETY_SECONDS)
    return found


def test_both_ends_exchange_messages_until_one_closes(listening):
    with pair(listening) as (leader, frontend):
        for message in MESSAGES:
            leader.send(message)
            frontend.send(message)
        assert receive(leader, 2) == receive(frontend, 2) == MESSAGES and leader.receive(0.0) == []
        leader.send(MESSAGES[0])
        leader.close(SAFETY_SECONDS)
        assert receive(frontend, 1) == MESSAGES[:1]
        for end in (frontend, leader):
            with pytest.raises(ConnectionError, match="closed"):
                end.receive()


def test_a_peer_that_does_not_read_makes_nobody_wait(listening):
    big = Said("x" * 5_000_000)
    with pair(listening) as (leader, frontend):
        for message in (big, *MESSAGES):
            leader.send(message)
        assert leader._writer.is_alive()
        assert receive(frontend, 3) == [big, *MESSAGES]
        leader.send(big)
        leader.close()  # what is unsent is lost
        leader._writer.join(SAFETY_SECONDS)
        assert not leader._writer.is_alive()


@pytest.mark.parametrize(
    "data",
    [b"[{", b"{}", b"[[]]", b"[{}]", b"[[{}]]", b'[["Nobody"]]', b'[["Said"]]', b'["Said"]', b"\xff", b"[" * 10**5],
)
def test_what_is_no_message_is_an_error_of_the_connection(listening, data):
    address, accepted = listening
    connection = links.connect(address, KEY)
    connection.send_bytes(data)
    link = links.Link(accepted.get(timeout=SAFETY_SECONDS), KINDS)
    with pytest.raises(ConnectionError, match="no message"):
        link.receive()
    link.close()


def test_a_wrong_key_is_refused_by_both_sides(listening, caplog):
    address, accepted = listening
    with pytest.raises(ConnectionError, match="no HTTP process that knows the key"):
        links.connect(address, bytes(32))
    with pair(listening):
        assert accepted.empty()


def test_silent_strangers_keep_nobody_waiting(listening):
    address, accepted = listening
    strangers = [Client(address) for _ in range(links.MAX_HANDSHAKES - 1)]
    with pair(listening):
        pass
    strangers[0].send_bytes(b"hello")
    with pytest.raises((EOFError, OSError)):
        [strangers[0].recv_bytes() for _ in range(3)]
    assert accepted.empty()
    for stranger in strangers:
        stranger.close()


def test_a_handshake_has_a_time_limit(listening, monkeypatch):
    monkeypatch.setattr(links, "HANDSHAKE_SECONDS", 0.0)
    address, accepted = listening
    stranger = Client(address)
    with pytest.raises((EOFError, OSError)):
        [stranger.recv_bytes() for _ in range(2)]
    assert accepted.empty()


def test_a_leader_refuses_a_frontend_that_only_repeats_what_it_hears(tmp_path):
    with Listener(str(tmp_path / "s")) as listener:

        def echo():
            with listener.accept() as peer:
                peer.send_bytes(b"#CHALLENGE#{sha256}" + bytes(40))
                peer.recv_bytes()
                peer.send_bytes(b"#WELCOME#")
                peer.send_bytes(peer.recv_bytes())

        thread = threading.Thread(target=echo)
        thread.start()
        with pytest.raises(ConnectionError, match="knows the key"):
            links.connect(str(tmp_path / "s"), KEY)
        thread.join()


def test_nobody_listens_there(tmp_path):
    with pytest.raises(ConnectionError), socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
        closed.close()
        links.connect(("127.0.0.1", port), KEY)
