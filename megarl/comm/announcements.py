"""Messages between ranks through the process group's store: what no collective has to carry.

A sender never waits, so it may be any number of messages ahead of its receivers. Anyone who reaches the store's port
can write to it, so messages are plain JSON.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist

from megarl.arguments import Settings
from megarl.groups import PromptGroups


class Announcements:
    """A queue from which each receiver takes every message, in the order of sending."""

    def __init__(self, name: str, sender: int | None = None, receivers: Collection[int] | None = None):
        """`name`: unique in the program; `sender`: world rank, None: any rank sends; `receivers`: world ranks, None:
        one, which any rank may be."""
        self._prefix, self._store = f"megarl/{name}", dist.distributed_c10d._get_default_store()
        self._receivers = 1 if receivers is None else len(receivers)
        # Whether `send` does anything on this rank.
        self.sends = sender in (None, dist.get_rank()) and self._receivers > 0
        self._taken = 0  # messages that this rank has taken
        self._progress_key = f"{self._prefix}/progress"

    def send(self, message: dict[str, Any]):
        """Sends a message, which the store refuses above 8 MiB; other ranks than the sender return at once, and so does
        a sender without receivers."""
        if self.sends:
            number = self._store.add(f"{self._prefix}/sent", 1)
            self._store.set(self._key(number), json.dumps(message, separators=(",", ":")))

    def has_next(self) -> bool:
        """Whether `take` would return at once. For receivers."""
        return self._store.check([self._key(self._taken + 1)])

    def wait(self):
        """Waits for the next message. DistStoreError if none comes within the store's time-out. For receivers."""
        self._store.wait([self._key(self._taken + 1)])

    def take(self) -> dict[str, Any]:
        """The next message, for receivers; waits for it. Errors as of `wait`, and RuntimeError: it is damaged."""
        self.wait()
        self._taken += 1
        key = self._key(self._taken)
        try:
            message = json.loads(self._store.get(key))
        except (ValueError, RecursionError) as error:
            raise RuntimeError(f"the message {key} is damaged: {error}") from None
        if self._receivers == 1:
            self._store.delete_key(key)
        elif self._store.add(f"{key}/taken", 1) == self._receivers:
            self._store.delete_key(key)
            self._store.delete_key(f"{key}/taken")
        return message

    def close(self):
        """Removes the queue from the store; its receiver calls it after the last message that anyone sends."""
        self._store.delete_key(f"{self._prefix}/sent")

    def set_progress(self, number: int):
        """Says how far the sender is, ahead of the next message; other ranks than the sender return at once."""
        if self.sends:
            self._store.set(self._progress_key, str(number))

    def progress(self) -> int:
        """How far the sender is by now; waits until it has said so."""
        return int(self._store.get(self._progress_key))

    def _key(self, number: int) -> str:
        return f"{self._prefix}/{number}"


# -- early responses -----------------------------------------------------------------------------------------------

# Responses that a judge on other ranks reads as soon as each has ended, while the rollout still generates others.
#
# They go through the store, from the leaders of the rollout to those of the judge, as tokens: the batch brings them to
# the judge's ranks once more, and nothing but the time of judging depends on what came before. The groups of a round go
# to the judge's replicas round-robin, as `load_balance.round_robin_assignment` says.


MAX_TOKENS = 1_000_000  # of a response: as JSON they are less than the 8 MiB of a store's value


def judges_early(settings: Settings, has_judge: bool, reward: range, rollout: range) -> bool:
    """Whether responses are judged while others are generated: a judge has ranks beside those of the rollout. `reward`,
    `rollout`: ranks of the roles. With over-sampling it is known only at the end of a round which groups it keeps, and
    a response's number in the step decides on the random numbers of its judgement."""
    s = settings
    is_beside = set(reward).isdisjoint(rollout) and not s.debug_train_only
    return has_judge and is_beside and s.over_sampling == 1 and s.max_response_length <= MAX_TOKENS


def response_queue(step: int, number: int, dp_rank: int) -> Announcements:
    """The responses of a round, of this number in the step, for the judge's replica `dp_rank`: {"sequence", "tokens"}.
    Its leader closes the queue after the last one."""
    return Announcements(f"responses/{step}/{number}/{dp_rank}")


class ResponseSender:
    """Sends the responses of a round, on a leader of the rollout."""

    def __init__(self, step: int, number: int, groups: PromptGroups, replicas: int):
        """`number`: of the round in the step; `groups`: of the round; `replicas`: of the judge."""
        self._dp_ranks, self._sent = groups.round_robin(replicas).tolist(), set[int]()
        self._queues = [response_queue(step, number, dp_rank) for dp_rank in range(replicas)]

    def send(self, sequence: int, tokens: Sequence[int] | None):
        """Sends a response, unless it was sent. `tokens`: without the prompt's; None if its environment failed."""
        if sequence not in self._sent:
            self._sent.add(sequence)
            queue = self._queues[self._dp_ranks[sequence]]
            queue.send({"sequence": sequence, "tokens": None if tokens is None else [*tokens]})
