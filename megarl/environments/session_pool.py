"""The sessions of a replica, on its leader: in the place of an `EnvironmentPool`, without processes of its own."""

import itertools
from typing import Any, NoReturn

from megarl.environments.calls import Answer, Asked, Close, Offer, Replied, Reply
from megarl.environments.protocol import Task, Turn
from megarl.serving.links import Link
from megarl.tool_formats.chosen_format import load_format


class SessionPool:
    """Offers episodes to the HTTP process; `poll` reports what drivers ask, and how they end."""

    def __init__(self, link: Link, parser: str, retries: int):
        """`retries`: how often an episode is offered again after its driver has failed."""
        self.form = load_format(parser)
        self._link, self._retries = link, retries
        self._tickets = itertools.count()
        self._offered: dict[int, Offer] = {}

    def start(self, number: int, task: Task, environment: str | None = None, key: str | None = None):
        """Offers an episode. `key`: names it; None: it is one of an evaluation. `environment`: lines name none."""
        self._offer(Offer(number, next(self._tickets), task, key))

    def _offer(self, offer: Offer):
        self._offered[offer.number] = offer
        self._link.send(offer)

    def reply(self, number: int, ticket: int, request: int, reply: Reply):
        """Answers a request of a driver, unless its session has ended meanwhile."""
        offer = self._offered.get(number)
        if offer is not None and offer.ticket == ticket:
            self._link.send(Replied(number, ticket, request, reply))

    def end(self, number: int):
        """Takes an episode back, whether it has a driver or not; nothing more is reported of it."""
        if self._offered.pop(number, None) is not None:
            self._link.send(Close(number))

    def poll(self, seconds: float = 0.0) -> list[Answer | Asked]:
        """What has come, after waiting up to `seconds` for the first of it. RuntimeError: the HTTP process is gone."""
        try:
            came = self._link.receive(seconds)
        except ConnectionError as error:
            raise RuntimeError(f"--agent-sessions: the HTTP process is gone: {error}") from None
        found = [self._taken(message) for message in came]
        return [each for each in found if each is not None]

    def _taken(self, came: Asked | Answer) -> Answer | Asked | None:
        offer = self._offered.get(came.number)
        if offer is None or offer.ticket != came.ticket:
            return None  # of an episode that has ended
        if isinstance(came, Asked):
            return came
        if came.failure is not None and came.replayable and offer.failures < self._retries:
            self._offer(offer._replace(ticket=next(self._tickets), failures=offer.failures + 1))
            return None
        return came._replace(replayed=offer.failures, replayable=True)

    def close(self):
        """Closes the link."""
        self._link.close(1.0)

    def step(self, *_: Any) -> NoReturn:
        """An environment would answer a turn."""
        raise AssertionError("a session has no environment that answers turns")

    def take_up(self, *_: Any) -> list[Turn]:
        """An environment would go on with an episode."""
        raise AssertionError("a session has no environment that is restored")
