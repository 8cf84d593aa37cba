"""A saved episode of an agent with another answer: the agent runs once more, and the policy reads other messages.

An agent owns its loop, so it cannot be brought to a turn. It asks again what it asked, and gets the same turns, since
their random streams are named by what they continue. From the turn on, the messages that follow it have other contents
in each request. The agent itself knows only its own.
"""

from megarl.environments.agents.exchange import Ask, Reply, canonical
from megarl.environments.pool import Asked, EnvironmentPool, Event, PoolOptions
from megarl.environments.protocol import Message
from megarl.errors import UsageError
from megarl.rollout.replay.saved import SavedResponse


class ForkedPool(EnvironmentPool):
    """A pool for one agent, whose requests have other messages after a turn."""

    def __init__(self, options: PoolOptions, saved: SavedResponse, turn: int, texts: list[str]):
        """`turn`: of the saved episode, counted from 0; `texts`: of the messages that follow it."""
        super().__init__(options)
        self.answer: list[Message] = []  # the messages with other contents, once the agent has sent them
        self._prompt, self._tokens, self._texts = saved.before(turn), saved.turn_tokens(turn), texts
        self._asks: dict[tuple[int, int], Ask] = {}
        self._path: list[str] | None = None  # messages up to the turn, as text

    def poll(self, seconds: float = 0.0) -> list[Event | Asked]:
        """As of `EnvironmentPool`. UsageError for another number of messages than texts."""
        return [self._changed(each) if isinstance(each, Asked) else each for each in super().poll(seconds)]

    def _changed(self, asked: Asked) -> Asked:
        messages, path = list(asked.ask.messages), self._path
        if path is not None and len(messages) > len(path) and [canonical(m) for m in messages[: len(path)]] == path:
            first = len(path)
            last = next((i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
            if last - first != len(self._texts):
                raise UsageError(f"--answer: {len(self._texts)} texts; the agent sends {last - first} messages")
            other = zip(messages[first:last], self._texts, strict=True)
            self.answer = [message | {"content": text} for message, text in other]
            messages[first:last] = self.answer
        changed = asked._replace(ask=asked.ask._replace(messages=messages))
        self._asks[asked.ticket, asked.request] = changed.ask
        return changed

    def reply(self, number: int, ticket: int, request: int, reply: Reply):
        """As of `EnvironmentPool`; notes the turn after which messages change."""
        is_turn = list(reply.prompt) == self._prompt and list(reply.tokens) == self._tokens
        if self._path is None and reply.turn is not None and is_turn:
            self._path = [canonical(m) for m in (*self._asks[ticket, request].messages, reply.message)]
        super().reply(number, ticket, request, reply)
