"""The engine's source of requests in a multi-turn rollout: continuations that are ready first, then new episodes.

Turns that the samples of a branch share (`--branch-turns`) are generated once: these samples have the random streams of
their first turns in common, so they write the same turn to the same prompt, as long as their environments answer alike.
What a sample writes does not depend on that.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence

from megarl.comm.announcements import ResponseSender
from megarl.comm.role_mesh import RoleGroups
from megarl.data.images.book import Images
from megarl.mcore.inference.engine import RequestSource
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.observe import activity
from megarl.rollout.episodes.agent_episode import AgentEpisode
from megarl.rollout.episodes.client import EnvironmentClient, Result
from megarl.rollout.episodes.episode import FAILED, Episode, TurnRequest
from megarl.rollout.request_queue import GroupEarlyStop

Numbered = tuple[int, GenerationRequest]


class SharedTurns:
    """The shared turns of a round, on all ranks of a replica; weights are the same throughout."""

    def __init__(self):
        self.asked = 0  # requests for shared turns
        self.taken = 0  # those of them that have got another one's turn
        self._generated: dict[int, tuple] = {}  # identity of the turn, by the number of the request that gets it first
        self._waiting: dict[tuple, list[int]] = {}  # requests that wait for a turn, by its identity
        self._completions: dict[tuple, Completion] = {}

    def split(self, requests: Sequence[Numbered]) -> tuple[list[Numbered], dict[int, Completion]]:
        """(requests whose turns are to be generated, turns by number that others have got before)."""
        left, found = [], {}
        for number, request in requests:
            if request.trunk is None:
                left.append((number, request))
                continue
            turn = _identity(request)
            self.asked += 1
            self.taken += turn in self._completions or turn in self._waiting
            if turn in self._completions:
                found[number] = self._completions[turn]
            elif turn in self._waiting:
                self._waiting[turn].append(number)
            else:
                self._generated[number], self._waiting[turn] = turn, []
                left.append((number, request))
        return left, found

    def ended(self, number: int, completion: Completion) -> list[int]:
        """Keeps a turn that has been generated, if it is shared; returns the requests that wait for it."""
        turn = self._generated.pop(number, None)
        if turn is None:
            return []
        self._completions[turn] = completion
        return self._waiting.pop(turn)


def _identity(request: GenerationRequest) -> tuple:
    stops = None if request.stops is None else request.stops.stops
    return request.key, tuple(request.prompt), request.max_new_tokens, request.counted_tokens, stops


POLL_STEPS = 4  # between two polls of the environments, if a replica has several ranks and the engine has work
_FIRST_TURN = 1 << 32  # number of the first request of an agent: larger than those of episodes
WAIT_SECONDS = 0.05  # for an answer, before the engine looks again: replicas that share experts wait for each other


class EpisodeSource:
    """A `RequestSource` over another one, whose requests begin episodes. An episode stays with its replica.

    All ranks of a replica see the ends of turns, so all know how many environments have to answer. Only the leader
    talks to environments; what they answer is broadcast before it is applied, so all ranks take the same requests.

    A round that stops early ends when each episode has ended or has more new tokens than the limit, or as many and its
    environment has answered: until then it may still end within the limit. So an environment is waited for only as long
    as its answer may decide which groups are the earliest, and how far an episode comes depends on no clock.
    """

    def __init__(
        self,
        prompts: RequestSource,
        begin: Callable[[int, GenerationRequest], Episode],
        client: EnvironmentClient | None,
        role_groups: RoleGroups,
        max_open: int,
        early_stop: GroupEarlyStop | None = None,
        sender: ResponseSender | None = None,
        images: Images | None = None,
    ):
        """
        Args:
            prompts: requests for the first turns, numbered by sequence id; their prompts may still grow.
            begin: makes an episode of such a request and has the leader start its environment, or continues one.
            client: on the replica's leader; None elsewhere.
            max_open: episodes that may be open at a time.
            early_stop: learns which episodes end, and gives the limit on new tokens; None: all run to their ends.
            sender: sends each episode that has ended; None on ranks that send nothing.
            images: learns those of environments, which the leader's already knows; None: the policy reads none.
        """
        self.ended: list[Episode] = []
        self.stopped: list[Episode] = []  # they have not ended, or need more new tokens than the limit
        self.waiting_seconds = 0.0  # in which the engine had nothing to do but to wait for environments
        self._prompts, self._begin = prompts, begin
        self._client, self._role_groups = client, role_groups
        self.shared_turns = SharedTurns()
        self._max_open, self._early_stop, self._sender = max_open, early_stop, sender
        self._images = images if client is None else None
        self._limit: int | None = None  # on the new tokens of an episode
        self._open: dict[int, Episode] = {}
        self._ready: deque[Episode] = deque()
        self._ready_turns: deque[tuple[int, GenerationRequest]] = deque()  # of agents, by the numbers of their requests
        self._turn_of: dict[int, tuple[AgentEpisode, int]] = {}  # by these: episode and turn
        self._turn_numbers = itertools.count(_FIRST_TURN)
        self._asked: set[int] = set()  # episodes whose environment has to answer
        self._in_engine = 0
        self._takes = 0

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        """At most `room` requests for turns that can be generated now."""
        self._receive()
        new = min(room, self._max_open - len(self._open))
        if new > 0 and not self._prompts.is_empty():
            for number, request in self._prompts.take(new):
                self._open[number] = episode = self._begin(number, request)
                if isinstance(episode, AgentEpisode):
                    self._asked.add(number)
                    self._generate(episode, episode.complete_turns)
                elif episode.prompt_length:
                    self._go_on(episode)
                else:
                    self._asked.add(number)
        turns = [self._ready_turns.popleft() for _ in range(min(room, len(self._ready_turns)))]
        ready = [self._ready.popleft() for _ in range(min(room - len(turns), len(self._ready)))]
        self._in_engine += len(turns) + len(ready)
        requests = [*turns, *((episode.number, episode.next_request()) for episode in ready)]
        left, found = self.shared_turns.split(requests)
        for number, completion in found.items():
            self.turn_ended(number, completion)
        return left

    def is_empty(self) -> bool:
        """Whether all episodes have ended or are stopped."""
        return not self._open and self._prompts.is_empty()

    def response_limit(self) -> int | None:
        """The limit on the new tokens of an episode, None until there is one; stops those that are beyond it. A
        collective of the replica."""
        limit = None if self._early_stop is None else self._early_stop.longest()
        if limit != self._limit:
            self._limit, ready = limit, list(self._ready)
            self._ready.clear()
            for episode in ready:
                self._go_on(episode)
            for number in sorted(self._asked):
                if self._is_beyond(self._open[number]):
                    self._stop(self._open[number])
        return self._limit

    def wait(self):
        """Waits, without load, until an environment of this replica answers; called when no engine has work."""
        start = time.perf_counter()
        if self._client is not None and self._asked:
            with activity.limited():  # the pool limits how long an environment may take
                self._client.wait(WAIT_SECONDS)
        self.response_limit()
        self.waiting_seconds += time.perf_counter() - start

    def turn_ended(self, number: int, completion: Completion):
        """Takes in a turn that the engine has generated; sends it to the environment if it is complete."""
        self._in_engine -= 1
        for other in self.shared_turns.ended(number, completion):
            self.turn_ended(other, completion)
        if number in self._turn_of:
            return self._agent_turn_ended(*self._turn_of.pop(number), completion)
        episode = self._open[number]
        episode.add_turn(completion)
        if episode.end is not None:
            self._end(episode)
        elif episode.is_open or self._is_beyond(episode):
            self._stop(episode)
        else:
            self._asked.add(number)
            if self._client is not None:
                self._client.step(number, episode.turn_tokens(-1))
        return None

    def _agent_turn_ended(self, episode: AgentEpisode, turn: int, completion: Completion):
        """Takes in a turn that an agent has asked for; unless it has ended without waiting for it."""
        if self._open.get(episode.number) is not episode:
            return
        written = episode.write(turn, completion)
        if written is None or self._is_beyond(episode):
            self._stop(episode)
        elif self._client is not None:
            self._client.write(episode.number, turn, written)

    def _ask(self, asked: TurnRequest):
        episode = self._open[asked.number]
        if not isinstance(episode, AgentEpisode):
            episode = self._open[asked.number] = AgentEpisode(episode)
        episode.ask(asked)
        self._generate(episode, asked.turn)

    def _generate(self, episode: AgentEpisode, turn: int):
        """Has a turn of an agent generated, unless it would need more tokens than the limit."""
        if self._is_at_limit(episode):
            return self._stop(episode)
        number = next(self._turn_numbers)
        self._turn_of[number] = episode, turn
        self._ready_turns.append((number, episode.request_of(turn)))
        return None

    def _receive(self):
        """Applies what environments have answered. A collective of the replica, at most every few calls."""
        self._takes += 1
        is_shared = len(self._role_groups.replica) > 1
        if not self._asked or (is_shared and self._in_engine and self._takes % POLL_STEPS):
            return
        results: list[Result] = [] if self._client is None else self._client.results()
        for result in self._role_groups.broadcast_object(results):
            for data in result.images if self._images is not None else ():
                self._images.keep(data)
            if result.number not in self._asked:
                continue  # of an episode that was stopped
            if isinstance(result, TurnRequest):
                self._ask(result)
                continue
            episode = self._open[result.number]
            self._asked.discard(result.number)
            episode.apply(result)
            if episode.end is None:
                self._go_on(episode)
            else:
                self._end(episode)

    def _is_beyond(self, episode: Episode) -> bool:
        return self._limit is not None and episode.new_tokens > self._limit

    def _is_at_limit(self, episode: Episode) -> bool:
        return self._limit is not None and episode.new_tokens >= self._limit

    def _go_on(self, episode: Episode):
        """Has the next turn generated, unless it would need more tokens than the limit."""
        (self._stop if self._is_at_limit(episode) else self._ready.append)(episode)

    def _stop(self, episode: Episode):
        self.stopped.append(self._close(episode))
        if episode.number in self._asked:  # its environment is ahead of what the next round continues
            self._asked.discard(episode.number)
            # An agent may wait for what the next round writes.
            goes_on = isinstance(episode, AgentEpisode) and episode.limits.is_carried
            if self._client is not None and not goes_on:
                self._client.end(episode.number)

    def _close(self, episode: Episode) -> Episode:
        """Takes an episode from the open ones, with the turns that its agent still waits for."""
        self._ready_turns = deque(each for each in self._ready_turns if self._turn_of[each[0]][0] is not episode)
        return self._open.pop(episode.number)

    def _end(self, episode: Episode):
        self.ended.append(self._close(episode))
        if self._early_stop is not None:
            self._early_stop.add(episode.number, episode.new_tokens)
        if self._sender is not None:
            written = None if episode.end == FAILED else episode.tokens[episode.prompt_length :]
            self._sender.send(episode.number, written)
        if self._client is not None:
            self._client.end(episode.number)
