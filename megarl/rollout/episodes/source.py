"""The engine's source of requests in a multi-turn rollout: continuations that are ready first, then new episodes."""

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from megarl.comm.role_mesh import RoleGroups
from megarl.mcore.inference.engine import RequestSource
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.observe import activity
from megarl.rollout.episodes.episode import EnvironmentResult, Episode

if TYPE_CHECKING:
    from megarl.rollout.episodes.client import EnvironmentClient

POLL_STEPS = 4  # between two polls of the environments, if a replica has several ranks and the engine has work
WAIT_SECONDS = 0.05  # for an answer, before the engine looks again: replicas that share experts wait for each other


class EpisodeSource:
    """A `RequestSource` over another one, whose requests begin episodes. An episode stays with its replica.

    All ranks of a replica see the ends of turns, so all know how many environments have to answer. Only the leader
    talks to environments; what they answer is broadcast before it is applied, so all ranks take the same requests.
    """

    def __init__(
        self, prompts: RequestSource, begin: Callable[[int, GenerationRequest], Episode],
        client: "EnvironmentClient | None", role_groups: RoleGroups, max_open: int,
    ):  # fmt: skip
        """
        Args:
            prompts: requests for the first turns, numbered by sequence id; their prompts may still grow.
            begin: makes an episode of such a request, and has the leader start its environment.
            client: on the replica's leader; None elsewhere.
            role_groups: of the rollout.
            max_open: episodes that may be open at a time.
        """
        self.ended: list[Episode] = []
        self.waiting_seconds = 0.0  # in which the engine had nothing to do but to wait for environments
        self._prompts, self._begin = prompts, begin
        self._client, self._role_groups = client, role_groups
        self._max_open = max_open
        self._open: dict[int, Episode] = {}
        self._ready: deque[Episode] = deque()
        self._asked: set[int] = set()  # episodes whose environment has to answer
        self._in_engine = 0
        self._takes = 0

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        """At most `room` requests for turns that can be generated now."""
        self._receive()
        new = min(room, self._max_open - len(self._open))
        if new > 0 and not self._prompts.is_empty():
            for number, request in self._prompts.take(new):
                self._open[number] = self._begin(number, request)
                self._asked.add(number)
        ready = [self._ready.popleft() for _ in range(min(room, len(self._ready)))]
        self._in_engine += len(ready)
        return [(episode.number, episode.next_request()) for episode in ready]

    def is_empty(self) -> bool:
        """Whether all episodes have ended."""
        return not self._open and self._prompts.is_empty()

    def wait(self):
        """Waits, without load, until an environment of this replica answers; called when no engine has work."""
        start = time.perf_counter()
        if self._client is not None and self._asked:
            with activity.limited():  # the pool limits how long an environment may take
                self._client.wait(WAIT_SECONDS)
        self.waiting_seconds += time.perf_counter() - start

    def turn_ended(self, number: int, completion: Completion):
        """Takes in a turn that the engine has generated; sends it to the environment."""
        episode = self._open[number]
        self._in_engine -= 1
        episode.add_turn(completion)
        if episode.end is not None:
            self._end(episode)
            return
        self._asked.add(number)
        if self._client is not None:
            self._client.step(number, completion.tokens)

    def _receive(self):
        """Applies what environments have answered. A collective of the replica, at most every few calls."""
        self._takes += 1
        is_shared = len(self._role_groups.replica) > 1
        if not self._asked or (is_shared and self._in_engine and self._takes % POLL_STEPS):
            return
        results: list[EnvironmentResult] = [] if self._client is None else self._client.results()
        for result in self._role_groups.broadcast_object(results):
            episode = self._open[result.number]
            self._asked.discard(result.number)
            episode.apply(result)
            if episode.end is None:
                self._ready.append(episode)
            else:
                self._end(episode)

    def _end(self, episode: Episode):
        del self._open[episode.number]
        self.ended.append(episode)
        if self._client is not None:
            self._client.end(episode.number)
