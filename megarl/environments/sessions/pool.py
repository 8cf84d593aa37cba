"""The sessions of a replica, on its leader: in the place of an `EnvironmentPool`, without processes of its own."""

import itertools
from typing import Any, NamedTuple, NoReturn

from megarl.environments.agents.exchange import Reply
from megarl.environments.pool import Asked, Event
from megarl.environments.protocol import Observation, Task, Turn
from megarl.environments.sessions import messages
from megarl.serving.links import Link
from megarl.tool_formats.chosen_format import load_format


class _Offered(NamedTuple):
    """An episode that waits for a driver, or has one."""

    task: Task
    key: str | None
    ticket: int  # another one if it is offered again
    failures: int


class SessionPool:
    """Offers episodes to the HTTP process; `poll` reports what drivers ask, and how they end."""

    def __init__(self, link: Link, parser: str, retries: int):
        """
        Args:
            link: with the HTTP process.
            parser: format of tool calls.
            retries: how often an episode is offered again after its driver has failed.
        """
        self.form = load_format(parser)
        self._link, self._retries = link, retries
        self._tickets = itertools.count()
        self._offered: dict[int, _Offered] = {}

    def start(self, number: int, task: Task, environment: str | None = None, key: str | None = None):
        """Offers an episode. `key`: names it; None: it is one of an evaluation. `environment`: lines name none."""
        self._offer(number, _Offered(task, key, next(self._tickets), 0))

    def _offer(self, number: int, offered: _Offered):
        self._offered[number] = offered
        self._link.send(messages.offer(number, offered.ticket, offered.task, offered.key))

    def reply(self, number: int, ticket: int, request: int, reply: Reply):
        """Answers a request of a driver, unless its session has ended meanwhile."""
        offered = self._offered.get(number)
        if offered is not None and offered.ticket == ticket:
            common = {"number": number, "ticket": ticket, "request": request}
            self._link.send({"type": "reply", **common, "reply": messages.reply_as_json(reply)})

    def end(self, number: int):
        """Takes an episode back, whether it has a driver or not; nothing more is reported of it."""
        if self._offered.pop(number, None) is not None:
            self._link.send({"type": "withdraw", "number": number})

    def poll(self, seconds: float = 0.0) -> list[Event | Asked]:
        """What has come since the last call, after waiting up to `seconds` for the first of it.

        Raises:
            RuntimeError: the HTTP process is gone.
        """
        try:
            came = self._link.receive(seconds)
        except ConnectionError as error:
            raise RuntimeError(f"--agent-sessions: the HTTP process is gone: {error}") from None
        found = [self._taken(message) for message in came]
        return [each for each in found if each is not None]

    def _taken(self, message: dict[str, Any]) -> Event | Asked | None:
        number, ticket = message["number"], message["ticket"]
        offered = self._offered.get(number)
        if offered is None or offered.ticket != ticket:
            return None  # of an episode that has ended
        if message["type"] == "asked":
            return Asked(number, ticket, message["request"], messages.ask_of(message["ask"]))
        if message["failure"] is not None and message["retry"] and offered.failures < self._retries:
            self._offer(number, offered._replace(ticket=next(self._tickets), failures=offered.failures + 1))
            return None
        end = None if message["observation"] is None else Observation(**message["observation"])
        return Event(
            number=number, observation=end, failure=message["failure"], tools=[], turn=None, seconds=message["seconds"],
            replayed=offered.failures, late=0, from_journal=False, replayable=True, is_agent=True,
        )  # fmt: skip

    def close(self):
        """Closes the link."""
        self._link.close(1.0)

    def step(self, *_: Any) -> NoReturn:
        """An environment would answer a turn."""
        raise AssertionError("a session has no environment that answers turns")

    def take_up(self, *_: Any) -> list[Turn]:
        """An environment would go on with an episode."""
        raise AssertionError("a session has no environment that is restored")
