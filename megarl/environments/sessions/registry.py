"""The sessions that wait for a driver, and those that have one, in the HTTP process."""

import asyncio
import dataclasses
import json
import secrets
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.environments.agents.session import Session
from megarl.environments.calls import Answer, Ask, Asked, Close, Offer, Replied
from megarl.environments.protocol import Observation
from megarl.measurements import NamesOfRun
from megarl.serving.errors import RequestError

MAX_ENDED = 1 << 14  # sessions whose ends are remembered, for errors that say so

Place = tuple[Any, int]  # link of a leader, number of the episode there


@dataclasses.dataclass
class OpenSession:
    """An episode that a driver has."""

    name: str  # in paths
    place: Place
    offer: Offer
    session: Session

    @property
    def facts(self) -> dict[str, Any]:
        """Which episode it is: its group, its place in it, and whether it belongs to an evaluation."""
        group, _, sample = (self.offer.key or "").rpartition("/")
        return {"group": group or None, "sample": int(sample) if sample else None, "evaluation": self.offer.key is None}


class Registry:
    """Hands out episodes in the order in which they came, so the siblings of a group one after another."""

    def __init__(self, seconds: float, record: Path | None, time: Callable[[], float]):
        """
        Args:
            seconds: for which a session may be without a request, and offers without any driver.
            record: file to which the order of claims and ends is appended; None: it is not written.
            time: of the running loop.
        """
        self._seconds, self._record, self._time = seconds, record, time
        self.part_names = NamesOfRun()
        self._waiting: dict[Place, Offer] = {}
        self._open: dict[str, OpenSession] = {}
        self._names: dict[Place, str] = {}
        self._ended: deque[str] = deque(maxlen=MAX_ENDED)
        self._last_driver = time()  # when a driver has asked for anything

    # -- leaders -----------------------------------------------------------------------------------------------------

    def receive(self, link: Any, message: Offer | Close | Replied):
        """Takes a message of a leader."""
        place = link, message.number
        if isinstance(message, Offer):
            self._waiting[place] = message
            if len(self._waiting) == 1:
                self._last_driver = max(self._last_driver, self._time())  # nobody could take one before
        elif isinstance(message, Close):
            self._waiting.pop(place, None)
            if place in self._names:
                self._forget(self._open[self._names[place]])
        else:
            found = self._open.get(self._names.get(place, ""))
            if found is not None and found.offer.ticket == message.ticket:
                found.session.receive(message.request, message.reply)

    # -- drivers -----------------------------------------------------------------------------------------------------

    def claim(self) -> OpenSession:
        """The next episode. RequestError 503 if none waits."""
        self._last_driver = self._time()
        if not self._waiting:
            raise RequestError(503, "no session waits now", code="no_session", headers={"Retry-After": "1"})
        place = next(iter(self._waiting))
        offer, (link, number) = self._waiting.pop(place), place

        def send(request: int, ask: Ask):
            link.send(Asked(number, offer.ticket, request, ask))

        session = Session(send)
        session.shows_tokens = True
        name = secrets.token_hex(12)
        found = self._open[name] = OpenSession(name, place, offer, session)
        self._names[place] = name
        self._write("claimed", found)
        return found

    def get(self, name: str) -> OpenSession:
        """The session of a name. RequestError 404 for an unknown one, 409 for one that has ended."""
        self._last_driver = self._time()
        if name in self._open:
            return self._open[name]
        if name in self._ended:
            raise RequestError(409, "this session has ended", code="session_ended")
        raise RequestError(404, "there is no such session", code="unknown_session")

    def finish(self, found: OpenSession, end: Observation | None, failure: str | None = None, retry: bool = True):
        """Ends a session with its score, or with a failure."""
        _send_end(found.place, found.offer, end, retry, found.session.worked_seconds, failure)
        self._write("failed" if end is None else "finished", found, reward=None if end is None else end.reward)
        self._forget(found)

    def _forget(self, found: OpenSession):
        del self._open[found.name], self._names[found.place]
        self._ended.append(found.name)
        found.session.close(RequestError(409, "this session has ended", code="session_ended"))

    # -- time --------------------------------------------------------------------------------------------------------

    def expire(self):
        """Ends sessions without requests, those that were refused too often, and offers if there is no driver."""
        now = self._time()
        for found in list(self._open.values()):
            if found.session.spent.is_set():
                self.finish(found, Observation(done=True, correct=False))
            elif found.session.idle_seconds > self._seconds:
                self.finish(found, None, f"its driver asked nothing for {self._seconds:g} s")
            elif found.session.idle_seconds == 0.0:  # the policy writes for a driver
                self._last_driver = now
        if self._waiting and now - self._last_driver > self._seconds:
            failure = f"no driver has asked for a session, or in one, for {self._seconds:g} s"
            for place, offer in self._waiting.items():
                _send_end(place, offer, None, False, 0.0, failure)
            self._waiting.clear()

    async def watch(self, tick: float):
        """Expires for ever."""
        while True:
            await asyncio.sleep(tick)
            self.expire()

    def _write(self, event: str, found: OpenSession, **more: Any):
        """Appends a line to the record."""
        if self._record is None:
            return
        with open(self._record, "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "session": found.name, **found.facts, **more}) + "\n")


def _send_end(place: Place, offer: Offer, end: Observation | None, retry: bool, seconds: float, failure: str | None):
    """Tells a leader the end of an episode. `retry`: whether another driver may try."""
    link, number = place
    link.send(Answer(number, offer.ticket, end, [], retry, seconds, failure, is_agent=True))
