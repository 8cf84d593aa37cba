"""Sessions that no driver takes, or asks in, expire; without a clock."""

import asyncio
import json
from pathlib import Path

import pytest

from megarl.environments.calls import Answer, Offer
from megarl.environments.protocol import Task
from megarl.environments.sessions.registry import Registry
from megarl.serving.errors import RequestError


class Link:
    """A leader that remembers what it is told."""

    def __init__(self):
        self.told: list[Answer] = []

    def send(self, message: Answer):
        """Remembers it."""
        self.told.append(message)


def offered(number: int) -> Offer:
    """An offer."""
    return Offer(number, number, Task([]), f"1/2/{number}")


def test_what_no_driver_asks_for_expires(tmp_path: Path):
    async def lives():
        now, link = 100.0, Link()
        loop = asyncio.get_running_loop()
        registry = Registry(10.0, tmp_path / "record", lambda: now)
        registry.receive(link, offered(0))
        registry.receive(link, offered(1))
        now = 109.0
        first = registry.claim()
        first.session._idle_since = loop.time() - 11.0  # it has asked nothing for 11 s
        registry.expire()
        (end,) = link.told
        assert end.failure == "its driver asked nothing for 10 s" and end.replayable and end.number == 0
        with pytest.raises(RequestError, match="has ended"):
            registry.get(first.name)
        now = 118.0
        registry.expire()
        assert len(link.told) == 1  # a driver has been here 9 s ago
        now = 120.0
        registry.expire()
        assert not link.told[1].replayable and link.told[1].number == 1
        with pytest.raises(RequestError, match="no session waits"):
            registry.claim()

    asyncio.run(lives())
    events = [json.loads(line)["event"] for line in (tmp_path / "record").read_text().splitlines()]
    assert events == ["claimed", "failed"]
