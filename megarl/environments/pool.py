"""The environments of a replica, in worker processes; the rank's process has no threads and no event loop for them.

An environment that crashes, or takes too long, is created again and brought to its last state by its earlier turns
and observations; so are those that a dead process had. Only failures of its own count: episodes that waited for an
answer of a process that died are played again in a process each, which shows whose environment ends it.
"""

import dataclasses
import itertools
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from typing import NamedTuple

from megarl.child_process import Child
from megarl.data.images.book import Images
from megarl.data.images.names import PATTERN
from megarl.environments.calls import Answer, Asked, Call, Close, Replied, Reply
from megarl.environments.journal import Journal
from megarl.environments.protocol import ImageBytes, Message, Observation, Task, Turn, parse_turn
from megarl.errors import UsageError
from megarl.tool_formats.chosen_format import load_format

MAX_ALONE = 4  # processes at a time that have one episode each


class PoolOptions(NamedTuple):
    """How environments run."""

    workers: int  # processes
    timeout: float  # seconds that reset and each step may take
    retries: int  # of an episode whose environment failed
    parser: str  # of tool calls
    default: str  # name of the environment of tasks that name none
    images: Images | None = None  # that the policy reads; None: it reads none


# A turn as text, and with the special tokens that are marks of tool calls; None: it has none.
TurnText = tuple[str, str | None]


def kept_images(images: Images | None, shown: ImageBytes) -> str:
    """Makes the images of an answer known, and keeps them; why the policy cannot read them, "": it can."""
    if not shown:
        return ""
    if images is None:
        return _NOT_READ
    try:
        for data in shown.values():
            images.keep(data)
    except UsageError as error:
        return f"a message {error}"
    return ""


_NOT_READ = "its messages have images; the model has no vision tower, or no chat template"


def unknown_image(images: Images | None, messages: Sequence[Message]) -> str:
    """Why the policy cannot read images that messages name, whose bytes came earlier; "": it can."""
    said = [str(each.get("content") or "") for each in messages if each["role"] != "assistant"]
    for content in filter(PATTERN.search, said):
        if images is None:
            return _NOT_READ
        try:
            images.check_known(content)
        except UsageError as error:
            return f"a message: {error}"
    return ""


class EnvironmentProcess(Child):
    """A process with environments; `episodes` are the numbers of those that it has."""

    def __init__(self, timeout: float, is_alone: bool = False):
        # Sets in the same order in each process: an environment that is played again may depend on it.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        super().__init__("megarl.environments.worker", repr(timeout), environment=environment)
        self.episodes: set[int] = set()
        self.is_alone = is_alone


class Processes:
    """The processes of a pool: those that share the episodes, those with one each, and those that get no more."""

    def __init__(self, workers: int, timeout: float):
        self.shared: list[EnvironmentProcess | None] = [None] * workers
        self.others: list[EnvironmentProcess] = []
        self._timeout = timeout

    def __iter__(self) -> Iterator[EnvironmentProcess]:
        return iter([*filter(None, self.shared), *self.others])

    def least_busy(self) -> EnvironmentProcess:
        """The process for one more episode. Starts one that is missing."""
        for slot, process in enumerate(self.shared):
            if process is None:
                process = self.shared[slot] = EnvironmentProcess(self._timeout)
                return process
        return min(filter(None, self.shared), key=lambda process: len(process.episodes))

    def alone(self) -> EnvironmentProcess | None:
        """A new process for a single episode; None if there are as many as may be."""
        if sum(process.is_alone for process in self.others) >= MAX_ALONE:
            return None
        self.others.append(EnvironmentProcess(self._timeout, is_alone=True))
        return self.others[-1]

    def retire(self, process: EnvironmentProcess):
        """The process gets no more episodes, and ends with the last one that it has."""
        if process in self.shared:
            self.shared[self.shared.index(process)] = None
            self.others.append(process)

    def leave(self, process: EnvironmentProcess, number: int):
        """An episode has left a process."""
        process.episodes.discard(number)
        if not process.episodes and process in self.others:
            self.end(process)

    def end(self, process: EnvironmentProcess):
        """Ends a process with all that it has started."""
        process.end()
        if process in self.others:
            self.others.remove(process)
        else:
            self.shared[self.shared.index(process)] = None

    def close(self):
        for process in self:
            process.end()
        self.shared, self.others = [None] * len(self.shared), []


class _Episode:
    """An open episode, and the call that its environment has to answer."""

    def __init__(self, number: int, name: str, task: Task, key: str | None):
        self.number, self.name, self.task, self.key = number, name, task, key
        self.tools: list[dict] = []  # since its reset
        self.turns: list[Turn] = []
        self.observations: list[Observation] = []
        self.process: EnvironmentProcess | None = None  # that has its environment; None: it must be created again
        self.is_suspect = False  # its environment may have ended its process, so that it must be alone in one
        self.replayable = True  # until its environment says otherwise
        self.ticket: int | None = None  # of the pending call
        self.deadline = 0.0
        self.restarts = self.late = 0  # for the pending call
        self.failures = 0
        self.asked: set[int] = set()  # requests of its agent that wait for the policy

    @property
    def is_lost(self) -> bool:
        return self.process is None and not self.replayable


class EnvironmentPool:
    """Environments of open episodes; `poll` reports what they answer."""

    def __init__(self, options: PoolOptions, journal: Journal | None = None):
        """`journal`: keeps answers, and gives those that it has; None: every answer comes from an environment."""
        self.options, self.journal = options, journal
        self.form = load_format(options.parser)
        self._processes = Processes(options.workers, options.timeout)
        self._episodes: dict[int, _Episode] = {}
        self._tickets, self._pending = itertools.count(), {}  # ticket -> episode
        self._events: list[Answer | Asked] = []
        self._waiting: deque[_Episode] = deque()  # suspects, for a process of their own

    def start(self, number: int, task: Task, environment: str | None = None, key: str | None = None):
        """Begins an episode: resets its environment. `key`: names it in the journal; None: it is not journalled."""
        self._episodes[number] = episode = _Episode(number, environment or self.options.default, task, key)
        self._ask(episode)

    def take_up(
        self,
        number: int,
        task: Task,
        environment: str | None,
        key: str | None,
        texts: Sequence[TurnText],
        observations: Sequence[Observation],
        tools: Sequence[dict] = (),
    ) -> list[Turn]:
        """Goes on with a replayable episode whose turns have all been answered; its next turn gets an environment.

        `tools`: that its reset has given. Returns the turns.
        """
        self._episodes[number] = episode = _Episode(number, environment or self.options.default, task, key)
        episode.tools = list(tools)
        for text in texts:
            self._add_turn(episode, text)
        episode.observations = list(observations)
        return list(episode.turns)

    def step(self, number: int, text: str, marked: str | None = None):
        """Has the environment of an episode answer a turn. `marked`: its text with marks that are special tokens."""
        episode = self._episodes[number]
        self._add_turn(episode, (text, marked))
        self._ask(episode)

    def reply(self, number: int, ticket: int, request: int, reply: Reply):
        """Answers a request of an agent, unless it has ended meanwhile."""
        episode = self._episodes.get(number)
        if episode is None or episode.ticket != ticket or request not in episode.asked:
            return
        episode.asked.remove(request)
        self._set_deadline(episode)
        episode.process.send(Replied(number, ticket, request, reply))

    def end(self, number: int):
        """Closes the environment of an episode, once it has answered; nothing more is reported of the episode."""
        episode = self._episodes.pop(number)
        self._pending.pop(episode.ticket, None)
        if episode in self._waiting:
            self._waiting.remove(episode)
        self._leave_process(episode)
        self._send_waiting()

    def poll(self, seconds: float = 0.0) -> list[Answer | Asked]:
        """What was answered, or asked by agents, since the last call; waits at most `seconds` for the first of it."""
        end = time.monotonic() + seconds
        while True:
            earliest = min((episode.deadline for episode in self._pending.values()), default=end)
            self._receive(0.0 if self._events else max(0.0, min(end, earliest) - time.monotonic()))
            self._drop_late()
            if self._events or time.monotonic() >= end:
                break
        if self.journal is not None:
            self.journal.flush()
        events, self._events = self._events, []
        return events

    def close(self):
        """Ends the processes, with all that they have started."""
        self._processes.close()
        self._episodes, self._pending, self._waiting = {}, {}, deque()

    def _add_turn(self, episode: _Episode, text: TurnText):
        plain, marked = text
        episode.turns.append(parse_turn(plain, len(episode.turns), self.form, episode.tools, marked))

    def _ask(self, episode: _Episode):
        episode.restarts = episode.late = 0
        found = self.journal.find(episode.key, episode.turns) if self.journal and episode.key else None
        if found is not None:
            self._leave_process(episode)  # its environment has not seen this turn
            observation, tools = found
            answer = Answer(episode.number, 0, observation, tools, episode.replayable, 0.0)
            self._report(episode, answer, from_journal=True)
        elif episode.is_lost:
            self._fail(episode, "its process ended, and the environment cannot be replayed")
        else:
            self._send(episode)

    def _send(self, episode: _Episode):
        task = dataclasses.replace(episode.task, images=())  # its environment has them
        if episode.process is None:
            task = episode.task
            process = self._processes.alone() if episode.is_suspect else self._processes.least_busy()
            if process is None:
                self._waiting.append(episode)
                return
            episode.process = process
            process.episodes.add(episode.number)
        episode.ticket = next(self._tickets)
        self._pending[episode.ticket] = episode
        episode.asked = set()
        self._set_deadline(episode)
        turns, observations = tuple(episode.turns), tuple(episode.observations)
        call = Call(episode.number, episode.ticket, episode.name, task, turns, observations)
        episode.process.send(call)

    def _set_deadline(self, episode: _Episode):
        """The worker limits restore and step, each; this is for a worker that does not answer at all."""
        seconds = float("inf") if episode.asked else 3 * self.options.timeout + 30.0
        episode.deadline = time.monotonic() + seconds

    def _send_waiting(self):
        for _ in range(len(self._waiting)):
            self._send(self._waiting.popleft())

    def _receive(self, seconds: float):
        processes = list(self._processes)
        if not processes:
            time.sleep(min(seconds, 0.1))
            return
        ready = connection.wait([process.connection for process in processes], seconds)
        for process in (process for process in processes if process.connection in ready):
            try:
                while process in self._processes and process.connection.poll():
                    self._take(process.connection.recv(), process)
            except (EOFError, OSError):
                self._lose(process, f"its process ended with status {process.status()}", is_late=False)

    def _take(self, answer: Answer | Asked, process: EnvironmentProcess):
        if isinstance(answer, Asked):
            if (episode := self._pending.get(answer.ticket)) is not None:
                episode.asked.add(answer.request)
                self._set_deadline(episode)
                images = self.options.images
                if problem := kept_images(images, answer.images) or unknown_image(images, answer.ask.messages):
                    refused = Reply(None, error=problem, code="invalid_image")
                    self.reply(episode.number, answer.ticket, answer.request, refused)
                else:
                    self._events.append(answer)
            return
        episode = self._pending.pop(answer.ticket, None)
        if episode is None:  # of an episode that has ended
            if answer.is_stuck and process in self._processes.shared:
                self._retire(process)
            return
        episode.ticket, episode.replayable = None, answer.replayable
        if answer.failure is None and (problem := kept_images(self.options.images, answer.images)):
            # Before a journal says that it was given.
            answer = answer._replace(observation=None, failure=problem)
        if answer.failure is None:
            episode.is_suspect = False
            if self.journal is not None and episode.key and episode.replayable and not answer.is_agent:
                self.journal.add(episode.key, episode.turns, answer.observation, answer.tools)
            self._report(episode, answer)
        elif answer.is_stuck:
            episode.is_suspect = True
            self._retire(process)
        if answer.failure is not None:
            self._leave_process(episode)
            self._retry(episode, answer.failure, answer.is_late)
        elif process in self._processes.others and episode.replayable:
            self._leave_process(episode)
        self._send_waiting()

    def _retire(self, process: EnvironmentProcess):
        """A thread of the process is stuck: it answers what it was asked, and its episodes go on in another one."""
        self._processes.retire(process)
        if not process.episodes:
            self._processes.end(process)
        for number in sorted(process.episodes):
            episode = self._episodes[number]
            if episode.ticket is None and episode.replayable:
                self._leave_process(episode)

    def _leave_process(self, episode: _Episode):
        """Marks the episode's environment to be created again when it is needed."""
        if episode.process is not None:
            process, episode.process = episode.process, None
            process.send(Close(episode.number))
            self._processes.leave(process, episode.number)

    def _retry(self, episode: _Episode, reason: str, is_late: bool):
        """Plays an episode again after a failure of its own, unless it had too many."""
        episode.failures += 1
        episode.late += is_late
        if episode.failures > self.options.retries or (episode.turns and not episode.replayable):
            self._fail(episode, reason)
        else:
            episode.restarts += 1
            self._send(episode)

    def _lose(self, process: EnvironmentProcess, reason: str, is_late: bool):
        """Ends a process that died or hangs; the episodes that wait for it are played again, each in its own one."""
        self._processes.end(process)
        lost = [self._episodes[number] for number in sorted(process.episodes)]
        waiting = [episode for episode in lost if episode.ticket is not None]
        for episode in lost:
            episode.process = None
        for episode in waiting:
            del self._pending[episode.ticket]
            episode.ticket, episode.is_suspect = None, True
            if len(waiting) == 1 or episode.is_lost:
                self._retry(episode, reason, is_late)
            else:
                episode.restarts += 1
                self._send(episode)
        self._send_waiting()

    def _drop_late(self):
        """Replaces processes that answer nothing at all."""
        now = time.monotonic()
        for process in {e.process for e in self._pending.values() if e.deadline <= now}:
            self._lose(process, f"no answer within {self.options.timeout:g} s, and its process hung", is_late=True)

    def _fail(self, episode: _Episode, reason: str):
        self._report(episode, Answer(episode.number, 0, None, [], episode.replayable, 0.0, reason))

    def _report(self, episode: _Episode, answer: Answer, from_journal: bool = False):
        turn = episode.turns[-1] if episode.turns else None
        if turn is None:
            episode.tools = answer.tools
        elif answer.observation is not None:
            episode.observations.append(answer.observation)
        answer = answer._replace(turn=turn, replayed=episode.restarts, late=episode.late, from_journal=from_journal)
        self._events.append(answer)
