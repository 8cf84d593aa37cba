"""The requests of a judge's engine: questions about responses that are complete, and those that need another try."""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from megarl.algorithms.token_sampling import stream_keys
from megarl.comm.announcements import Announcements
from megarl.comm.role_mesh import RoleGroups
from megarl.data.prompt import Prompt
from megarl.errors import UsageError
from megarl.groups import PromptGroups
from megarl.mcore.inference.generation import Completion, GenerationRequest
from megarl.observe.timers import Timers
from megarl.rewards.judge.config import JudgeConfig, JudgeQuestion, questions_of
from megarl.rewards.judge.judge_prompts import JudgePrompts

STREAMS = 0x6A75646765  # added to the seed, so that no judgement has the random numbers of a response
POLL_SECONDS = 0.01  # between two looks of a wait that has an end
POLL_STEPS = 4  # engine steps between two looks for responses, and for requests if a replica has several ranks
QuestionKey = tuple[int, int]  # stream and sample of a `JudgeQuestion`: unique in a step's batch


class JudgedText(NamedTuple):
    """A response as a judge reads it."""

    sequence: int  # its number in the step
    prompt: Prompt
    text: str


# One text of the judge, with the numbers of the responses that it is about; None: it has none.
Judgement = tuple[str, list[float] | None]


def _identity(response: JudgedText) -> tuple[int, int, str]:
    return response.sequence, response.prompt.index, response.text


class JudgeAnswer:
    """What the judge wrote about a question: one judgement for each try."""

    def __init__(self, question: JudgeQuestion, read: tuple[JudgedText, ...]):
        """`read`: the responses of the question, in the order in which the judge reads them."""
        self.question, self.read = question, read
        self.tokens: list[int] = []  # of the judge's prompt
        self.judgements: list[Judgement] = []
        self.problem: str | None = None  # why it was not asked

    def is_about(self, read: tuple[JudgedText, ...]) -> bool:
        """Whether the judge has read these responses."""
        return list(map(_identity, self.read)) == list(map(_identity, read))


class ArrivingResponses:
    """The responses to this replica's prompts of a round, as the rollout ends them, on the replica's leader."""

    def __init__(
        self,
        queue: Announcements,
        count: int,
        prompts: Sequence[Prompt | None],
        groups: PromptGroups,
        decode: Callable[[list[int]], str],
        together: bool,
    ):
        """
        Args:
            queue: of `response_queue`.
            count: of the responses that will come.
            prompts: of the round, by group; None: its responses are not judged.
            groups: of the round.
            decode: the text of a response's tokens.
            together: the judge reads several responses to a prompt together: groups arrive when they are complete.
        """
        self._queue, self._missing, self._prompts = queue, count, prompts
        self._group_of, self._sizes = groups.of(torch.arange(groups.count)).tolist(), groups.sizes.tolist()
        self._decode, self._together = decode, together
        self.patience: float | None = None  # seconds that a wait for a response may take; None: any time
        self._groups: dict[int, list[JudgedText | None]] = {}  # None: not judged, or an environment has failed

    @property
    def is_done(self) -> bool:
        """Whether all responses have come."""
        return not self._missing

    def receive(self) -> list[list[JudgedText]]:
        """The responses, or with `together` the groups, that are complete since the last call."""
        complete: list[Collection[JudgedText | None]] = []
        while self._missing and self._queue.has_next():
            message = self._queue.take()
            self._missing -= 1
            if self.is_done:
                self._queue.close()
            sequence, tokens = message["sequence"], message["tokens"]
            group = self._group_of[sequence]
            prompt, text = self._prompts[group], None
            if tokens is not None and prompt is not None:
                text = JudgedText(sequence, prompt, self._decode(tokens))
            members = self._groups.setdefault(group, [])
            members.append(text)
            if not self._together:
                complete.append([text])
            elif len(members) == self._sizes[group]:
                complete.append(self._groups.pop(group))
        found = [sorted(filter(None, texts), key=lambda text: text.sequence) for texts in complete]
        return [texts for texts in found if texts]

    def wait(self):
        """Waits for the next response, at most `patience`."""
        if self.patience is None:
            self._queue.wait()
            return
        deadline = time.monotonic() + self.patience
        while not self._queue.has_next() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


class JudgeRequests:
    """A `RequestSource` of the judge's engine, one object on each rank of a replica.

    The leader knows the questions; the requests that it makes of them are broadcast. A judgement without a number is
    followed by the next try as soon as the engine has room.
    """

    def __init__(
        self, config: JudgeConfig, prompts: JudgePrompts, role_groups: RoleGroups,
        read_numbers: Callable[[str, int], Judgement], seed: int, step: int, timers: Timers,
        arrivals: ArrivingResponses | None = None,
    ):  # fmt: skip
        """
        Args:
            read_numbers: the judgement with a text about so many responses.
            seed: of the run.
            arrivals: responses that will come, on the leader; None: there are none besides those of `ask`.
        """
        self.config, self.prompts, self.role_groups = config, prompts, role_groups
        self.answers: dict[QuestionKey, JudgeAnswer] = {}  # on the leader
        self.tokens = 0  # of the judgements so far
        self._read_numbers, self._arrivals = read_numbers, arrivals
        self._timers = timers
        self._seed, self._step = seed + STREAMS, step
        self._ready: deque[tuple[QuestionKey, int]] = deque()  # with the number of the try
        self._running: dict[int, tuple[QuestionKey, int]] = {}  # by the number of the request, on the leader
        self._made = self._in_engine = self._takes = 0
        self._is_over = False

    def ask(
        self, texts: Sequence[JudgedText], groups: Sequence[Sequence[int]], known: Mapping[QuestionKey, JudgeAnswer]
    ):
        """Adds the questions about some responses, on the leader.

        Args:
            groups: positions of the responses to each prompt, in order.
            known: answers to questions that need not be asked, if they are about the same responses.
        """
        for question in questions_of(self.config, [each.sequence for each in texts], groups):
            key = question.stream, question.sample
            answer = JudgeAnswer(question, tuple(texts[i] for i in question.members))
            before = known.get(key)
            if before is not None and before.is_about(answer.read):
                answer.judgements, answer.problem = before.judgements, before.problem
            else:
                try:
                    answer.tokens = self.prompts.tokens(answer.read[0].prompt, [each.text for each in answer.read])
                    self._ready.append((key, 0))
                except UsageError as error:
                    answer.problem = str(error)
            self.answers[key] = answer

    @property
    def has_ready(self) -> bool:
        """Whether something is to be asked, as far as is known. A collective of the replica."""
        return bool(self.role_groups.broadcast_number(len(self._ready)))

    def take(self, room: int) -> list[tuple[int, GenerationRequest]]:
        """At most `room` requests; the same on all ranks of the replica."""
        self._takes += 1
        may_look = not self._in_engine or self._takes % POLL_STEPS == 0
        if len(self.role_groups.replica) > 1 and not may_look:
            return []
        made = self._make(room, may_look) if self.role_groups.is_leader else None
        requests, self._is_over = self.role_groups.broadcast_object(made)
        self._in_engine += len(requests)
        return requests

    def _make(self, room: int, may_look: bool) -> tuple[list[tuple[int, GenerationRequest]], bool]:
        """At most `room` requests, and whether no more will follow. On the leader."""
        if self._arrivals is not None and may_look:
            for texts in self._arrivals.receive():
                self.ask(texts, [range(len(texts))], {})
        requests = []
        while self._ready and len(requests) < room:
            key, attempt = self._ready.popleft()
            self._running[self._made] = key, attempt
            requests.append((self._made, self._request(self.answers[key], attempt)))
            self._made += 1
        comes_more = self._arrivals is not None and not self._arrivals.is_done
        return requests, not (self._ready or self._running or comes_more)

    def _request(self, answer: JudgeAnswer, attempt: int) -> GenerationRequest:
        line = torch.tensor([answer.read[0].prompt.index])
        stream = torch.tensor([answer.question.stream << 20 | answer.question.sample << 10 | attempt])
        key = int(stream_keys(self._seed, self._step, line, stream))
        return GenerationRequest(prompt=answer.tokens, key=key, max_new_tokens=self.config.max_tokens)

    def is_empty(self) -> bool:
        """Whether all questions have been answered."""
        return self._is_over

    def wait(self):
        """Waits for a response. A collective of the replica: none of its ranks is held to compute meanwhile."""
        with self._timers.phase("reward", "wait"):
            if self._arrivals is not None and not self._arrivals.is_done:
                self._arrivals.wait()
            self.role_groups.broadcast_number(0)

    def ended(self, number: int, completion: Completion):
        """Takes in what the engine has written for a request."""
        self._in_engine -= 1
        self.tokens += len(completion.tokens)
        if not self.role_groups.is_leader:
            return
        key, attempt = self._running.pop(number)
        answer = self.answers[key]
        judgement = self._read_numbers(self.prompts.text(completion.tokens), len(answer.read))
        answer.judgements.append(judgement)
        if judgement[1] is None and attempt < self.config.retries:
            self._ready.append((key, attempt + 1))
