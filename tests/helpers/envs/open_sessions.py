"""The HTTP process of sessions with a leader that a test plays."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megarl.child_process import Child
from megarl.environments.calls import TO_LEADERS, Answer, Asked, Reply
from megarl.environments.protocol import Task, parse_turn
from megarl.environments.session_front import SessionsConfig
from megarl.environments.session_pool import SessionPool
from megarl.flags.serving import Serving
from megarl.serving import links
from tests.helpers.waiting import SAFETY_SECONDS, wait_until

API_KEY = "0123456789abcdef"
PROMPT, TOKENS, LOGPROBS = [5, 6], [7, 8], [-0.5, -0.25]


@dataclasses.dataclass
class Leader:
    """The leader of a replica, and where drivers find its sessions."""

    url: str
    pool: SessionPool
    child: Child
    record: Path
    came: list[Answer | Asked] = dataclasses.field(default_factory=list)

    def offer(self, number: int, text: str = "2+3=", key: str | None = None):
        """Begins an episode. `key`: `step/line/sample`."""
        task = Task([{"role": "user", "content": text}], "5", {"level": 1}, None, 7, 8)
        self.pool.start(number, task, None, key or f"4/9/{number}")

    def next(self) -> Answer | Asked:
        assert wait_until(self._poll)
        return self.came.pop(0)

    def _poll(self) -> bool:
        self.came += self.pool.poll(0.01)
        return bool(self.came)

    def answer(self, text: str = "5", **fields) -> Asked:
        """Answers the next request of a driver."""
        asked = self.next()
        assert isinstance(asked, Asked)
        turn = parse_turn(text, 0)
        common = {"prompt": PROMPT, "tokens": TOKENS, "logprobs": LOGPROBS}
        self.pool.reply(asked.number, asked.ticket, asked.request, Reply(turn, **{**common, **fields}))
        return asked


@contextlib.contextmanager
def open_sessions(api_keys: tuple[str, ...] = (API_KEY,), **settings) -> Iterator[Leader]:
    """The process, with one leader. `settings`: of the server."""
    with tempfile.TemporaryDirectory(prefix="megarl-sessions-") as folder:
        child = Child("megarl.environments.session_front")
        try:
            record = Path(folder) / "sessions.jsonl"
            server = Serving(**{"port": 0, **settings})
            child.send(SessionsConfig(server, list(api_keys), SAFETY_SECONDS, record, True, f"{folder}/leaders"))
            found = child.connection.recv()
            assert not isinstance(found, str), found
            url, address, key = found
            pool = SessionPool(links.Link(links.connect(address, key), TO_LEADERS), "hermes", 1)
            yield Leader(url, pool, child, record)
            pool.close()
        finally:
            child.end()
