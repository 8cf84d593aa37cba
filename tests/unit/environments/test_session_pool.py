"""Episodes that drivers have: offered again after a failure, as often as the run allows; late answers are dropped."""

import pytest

from megarl.environments.calls import TO_LEADERS, Answer, Ask, Asked, Close, Offer, Replied, Reply
from megarl.environments.protocol import Observation, Task, parse_turn
from megarl.environments.session_pool import SessionPool
from megarl.serving import links

TASK = Task([{"role": "user", "content": "a"}])


class Process:
    """The HTTP process: what it was told, and what it says next."""

    def __init__(self):
        self.told: list = []
        self.says: list = []

    def send(self, message):
        self.told.append(message)

    def receive(self, seconds: float) -> list:
        """What it says, as it comes over a link."""
        if self.says is None:
            raise ConnectionError("closed")
        said, self.says = links.packet(map(links.encode, self.says)), []
        return links.decode(said, TO_LEADERS)


def test_an_episode_is_offered_again_until_it_has_failed_too_often():
    process = Process()
    pool = SessionPool(process, "hermes", retries=1)
    pool.start(3, TASK, None, "1/2/0")
    process.says = [Answer(3, 0, None, [], True, 1.0, "it broke", is_agent=True)]
    assert pool.poll() == []
    assert process.told == [Offer(3, 0, TASK, "1/2/0"), Offer(3, 1, TASK, "1/2/0", failures=1)]
    process.says = [
        Answer(3, 0, Observation(reward=1.0), [], True, 1.0, is_agent=True),  # of the first driver
        Asked(3, 1, 0, Ask(TASK.messages, stops=("x",))),
        Answer(3, 1, None, [], True, 2.0, "it broke again", is_agent=True),
    ]
    asked, event = pool.poll()
    assert asked == Asked(3, 1, 0, Ask(TASK.messages, stops=("x",)))
    assert (event.failure, event.replayed, event.seconds) == ("it broke again", 1, 2.0)


def test_an_episode_that_has_ended_is_not_heard_of_any_more():
    process = Process()
    pool = SessionPool(process, "hermes", retries=1)
    pool.start(3, TASK)
    reply = Reply(parse_turn("5", 0))
    pool.reply(3, 0, 7, reply)
    pool.end(3)
    pool.reply(3, 0, 8, reply)
    process.says = [Asked(3, 0, 8, Ask(TASK.messages))]
    assert pool.poll() == [] and process.told[1:] == [Replied(3, 0, 7, reply), Close(3)]
    process.says = None
    with pytest.raises(RuntimeError, match="--agent-sessions: the HTTP process is gone: closed"):
        pool.poll()
