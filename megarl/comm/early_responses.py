"""Responses that a judge on other ranks reads as soon as each has ended, while the rollout still generates others.

They go through the store, from the leaders of the rollout to those of the judge, as tokens: the batch brings them to
the judge's ranks once more, and nothing but the time of judging depends on what came before. The groups of a round go
to the judge's replicas round-robin, as `load_balance.round_robin_assignment` says.
"""

import time
from collections.abc import Sequence

from megarl.arguments import Settings
from megarl.comm.announcements import MessageQueue
from megarl.groups import PromptGroups

MAX_TOKENS = 1_000_000  # of a response: as JSON they are less than the 8 MiB of a store's value
POLL_SECONDS = 0.01


def judges_early(settings: Settings, has_judge: bool, reward: range, rollout: range) -> bool:
    """Whether responses are judged while others are generated: a judge has ranks beside those of the rollout. `reward`,
    `rollout`: ranks of the roles. With over-sampling it is known only at the end of a round which groups it keeps, and
    a response's number in the step decides on the random numbers of its judgement."""
    s = settings
    is_beside = set(reward).isdisjoint(rollout) and not s.debug_train_only
    return has_judge and is_beside and s.over_sampling == 1 and s.max_response_length <= MAX_TOKENS


def _name(step: int, number: int, dp_rank: int) -> str:
    return f"responses/{step}/{number}/{dp_rank}"


class ResponseSender:
    """Sends the responses of a round, on a leader of the rollout."""

    def __init__(self, step: int, number: int, groups: PromptGroups, replicas: int):
        """`number`: of the round in the step; `groups`: of the round; `replicas`: of the judge."""
        self._dp_ranks, self._sent = groups.round_robin(replicas).tolist(), set[int]()
        self._queues = [MessageQueue(_name(step, number, dp_rank)) for dp_rank in range(replicas)]

    def send(self, sequence: int, tokens: Sequence[int] | None):
        """Sends a response, unless it was sent. `tokens`: without the prompt's; None if its environment failed."""
        if sequence not in self._sent:
            self._sent.add(sequence)
            queue = self._queues[self._dp_ranks[sequence]]
            queue.send({"sequence": sequence, "tokens": None if tokens is None else [*tokens]})


class ResponseReceiver:
    """Receives those responses of a round that a replica of the judge reads, on its leader."""

    def __init__(self, step: int, number: int, groups: PromptGroups, replicas: int, dp_rank: int):
        """`dp_rank`: the judge's; the others as of `ResponseSender`."""
        self._queue = MessageQueue(_name(step, number, dp_rank))
        self._missing = int((groups.round_robin(replicas) == dp_rank).sum())

    @property
    def is_done(self) -> bool:
        """Whether all responses have been received."""
        return not self._missing

    def receive(self) -> list[tuple[int, list[int] | None]]:
        """(sequence, tokens) of the responses that have come since the last call."""
        found = []
        while self._missing and self._queue.has_next():
            message = self._queue.take()
            found.append((message["sequence"], message["tokens"]))
            self._missing -= 1
            if self.is_done:
                self._queue.close()
        return found

    def wait(self, seconds: float | None = None):
        """Waits for the next response, at most so long."""
        if seconds is None:
            return self._queue.wait()
        deadline = time.monotonic() + seconds
        while not self._queue.has_next() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
