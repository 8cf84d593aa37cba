"""Frames, the handshake, and what both ends do when the other one is gone."""

import asyncio
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.serving import wire

KEY = bytes(range(32))
FRAMES = [{"type": "a", "text": "é\U0001f600\ud800"}, {"type": "b", "n": [-(2**63), 1.5, None]}, {"type": "c"}]


@given(st.lists(st.integers(1, 40), min_size=1))
@settings(deadline=None)
def test_frames_are_cut_from_a_stream_in_any_pieces(sizes):
    stream = b"".join(map(wire.encode_frame, FRAMES))
    buffer, found, start = wire.FrameBuffer(), [], 0
    for size in [*sizes, len(stream)]:
        found += buffer.feed(stream[start : start + size])
        start += size
    assert found == FRAMES


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\1{", b"\0\0\0\2[]", b"\0\0\0\2{}", b"\0\0\0\1\xff"])
def test_what_is_no_frame_is_an_error_of_the_connection(data):
    with pytest.raises(ConnectionError):
        wire.FrameBuffer().feed(data)


def served(path, key, talk):
    """Runs `talk(link)` as the frontend for one peer in a thread; returns (thread, list of its result or error)."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    result = []

    async def main():
        reader, writer = await asyncio.open_connection(sock=listener.accept()[0])
        try:
            link = await wire.FrontendLink.accept(reader, writer, key)
            result.append(await talk(link))
            link.close()
        except ConnectionError as error:
            result.append(error)

    def run():
        asyncio.run(main())
        listener.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result


def test_both_ends_exchange_frames(tmp_path):
    async def talk(link):
        link.send(FRAMES[0])
        link.send(FRAMES[1])
        return [await link.receive(), await link.receive()]

    thread, result = served(tmp_path / "s", KEY, talk)
    link = wire.LeaderLink.connect(str(tmp_path / "s"), KEY)
    link.send(FRAMES[2])
    link.send(FRAMES[1])
    assert link.flush(10.0)
    got = link.receive(10.0)
    while len(got) < 2:
        got += link.receive(10.0)
    thread.join()
    assert got == FRAMES[:2] and result == [[FRAMES[2], FRAMES[1]]]
    with pytest.raises(ConnectionError):
        link.receive(10.0)
    link.close()
    assert link.fileno() == -1


def test_large_frames_never_block_the_sender(tmp_path):
    big = {"type": "big", "data": "x" * 5_000_000}
    go = threading.Event()

    async def talk(link):
        await asyncio.to_thread(go.wait)
        return [await link.receive() for _ in range(2)]

    thread, result = served(tmp_path / "s", KEY, talk)
    link = wire.LeaderLink.connect(str(tmp_path / "s"), KEY)
    link.send(big)
    link.send(FRAMES[2])
    assert link.unsent > 0 and not link.flush(0.0)
    go.set()
    assert link.flush(30.0) and link.unsent == 0
    thread.join()
    assert result == [[big, FRAMES[2]]]
    link.close()


def test_a_wrong_key_is_refused_by_both_sides(tmp_path):
    thread, result = served(tmp_path / "s", KEY, lambda link: link.receive())
    with pytest.raises(ConnectionError):
        wire.LeaderLink.connect(str(tmp_path / "s"), bytes(32))
    thread.join()
    assert "does not know the key" in str(result[0])


def test_a_leader_refuses_a_frontend_that_only_repeats_what_it_hears(tmp_path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()

    def echo():
        peer = listener.accept()[0]
        peer.sendall(bytes(16))
        peer.sendall(peer.recv(48)[16:])
        peer.close()

    thread = threading.Thread(target=echo)
    thread.start()
    with pytest.raises(ConnectionError, match="key"):
        wire.LeaderLink.connect(str(tmp_path / "s"), KEY)
    thread.join()
    listener.close()
