"""A saved episode of an agent with another answer: the agent runs once more, and the policy reads other messages.

An agent owns its loop, so it cannot be brought to a turn. It asks again what it asked, and gets the same turns, since
their random streams are named by what they continue. From the turn on, the messages that follow it have other contents
in each request. The agent itself knows only its own.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.data.prompt import Prompt
from megarl.data.stop_strings import StopMatcher
from megarl.environments.agents.exchange import Ask, Reply, canonical
from megarl.environments.pool import Asked, EnvironmentPool, Event, PoolOptions
from megarl.environments.protocol import Message, Task
from megarl.errors import UsageError
from megarl.rollout.episodes.agent_episode import AgentEnd, AgentEpisode
from megarl.rollout.episodes.client import EnvironmentClient
from megarl.rollout.episodes.episode import Episode, TurnRequest
from megarl.rollout.replay.player import Player
from megarl.rollout.replay.saved import SavedResponse

if TYPE_CHECKING:
    from megarl.comm.role_mesh import RoleGroups

_WAIT = 1.0  # seconds between two looks at an agent


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


def run_again(
    client: EnvironmentClient | None, player: Player, episode: Episode, prompt: Prompt, task: Task,
    role_groups: "RoleGroups", matcher: Callable[[tuple[str, ...]], StopMatcher | None],
) -> Episode:  # fmt: skip
    """The episode with its agent, to its end. A collective of the replica.

    Args:
        client: on the leader, with a `ForkedPool`; None elsewhere.
        episode: that has not begun.
        matcher: of the stop strings of a request.
    """
    if client is not None:
        client.begin(0, prompt, episode.request, task, None)
    while episode.end is None:
        if client is not None:
            client.wait(_WAIT)
        for result in role_groups.broadcast_object([] if client is None else client.results()):
            if isinstance(result, TurnRequest):
                episode = episode if isinstance(episode, AgentEpisode) else AgentEpisode(episode)
                episode.ask(result)
                (completion,) = player.generate([episode.request_of(result.turn, matcher)])
                written = episode.write(result.turn, completion)
                if client is not None and written is not None:
                    client.write(0, result.turn, written)
            elif isinstance(result, AgentEnd):
                assert isinstance(episode, AgentEpisode)  # an agent that has not asked has failed
                episode.finish(result)
                episode.settle(None)
            else:
                episode.apply(result)
    return episode
