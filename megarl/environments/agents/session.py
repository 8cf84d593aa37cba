"""The requests of one episode's agent, between its HTTP endpoint and the rollout."""

import asyncio
import itertools
import re
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable

from megarl.data.images.decoding import size_of
from megarl.data.images.names import MARK, PATTERN, ImageRef, mark_of, sha256_of, shown
from megarl.environments.calls import Ask, Reply, digests
from megarl.environments.protocol import ImageBytes, Message, Observation, image_bytes
from megarl.errors import UsageError
from megarl.user_results import LateCall

_TICK = 0.5  # seconds between two looks at an agent
MAX_REFUSED = 16  # requests without a turn; then the agent is ended


class Session:
    """What an agent asks, in the order of its requests."""

    def __init__(self, send: Callable[[int, Ask, ImageBytes], None], reads_images: bool = True):
        """`send`: takes the number of a request, the request, and images that its messages may name; `receive` gets the
        reply. `reads_images`: whether requests may have images."""
        self.key = f"sk-{secrets.token_hex(24)}"  # that the agent's requests must have
        self.url = ""  # of OpenAI's API, once there is an endpoint
        self.answered: list[tuple[Ask, Reply]] = []  # requests that got a turn
        self.refused = 0  # requests that a budget has refused
        self.shows_tokens = False  # answers have the tokens of turns, for drivers outside of the run
        self.spent = asyncio.Event()  # requests get no turns any more, and the agent does not end by itself
        self._without_turn = 0  # requests
        self._send, self._numbers = send, itertools.count()
        self._reads_images, self._images, self._unsent = reads_images, set[str](), ImageBytes()
        self._pending: dict[int, asyncio.Future[Reply]] = {}
        self._missed: dict[str, list[asyncio.Future[Reply]]] = defaultdict(list)  # replies that nobody waits for
        self._idle_since = asyncio.get_running_loop().time()
        self._worked = 0.0  # seconds before that, while no request waited

    @property
    def root(self) -> str:
        """The URL without /v1, as Anthropic's clients want it."""
        return self.url.removesuffix("/v1")

    async def watch(self, work: Awaitable[Observation], seconds: float) -> Observation:
        """The result of an agent's work. LateCall, and the work is cancelled, if it asks nothing for `seconds`."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=min(seconds, _TICK))
                if self.idle_seconds > seconds and not task.done():
                    raise LateCall(f"the agent worked for more than {seconds:g} s without asking the policy")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))

    @property
    def idle_seconds(self) -> float:
        """For how long the agent has worked without asking; 0 while the policy writes."""
        return 0.0 if self._pending else asyncio.get_running_loop().time() - self._idle_since

    @property
    def worked_seconds(self) -> float:
        """For how long the agent has worked itself in all: while the policy wrote nothing for it."""
        return self._worked + self.idle_seconds

    async def mark(self, url: str) -> str:
        """What stands for an image of a request in its text; `url`: its data: URL. UsageError: it cannot be read."""
        if not self._reads_images:
            raise UsageError("has an image, which is not read here")
        data = await asyncio.to_thread(image_bytes, url)
        digest = sha256_of(data)
        if digest not in self._images:
            self._images.add(digest)
            self._unsent[digest] = data
        return mark_of(ImageRef(digest, *size_of(data)))

    def without_false_marks(self, message: Message) -> Message:
        """The message with U+FFFD in marks of images that no request had: its text may repeat others."""
        content = message.get("content")
        if message["role"] == "assistant" or not isinstance(content, str) or MARK not in content:
            return message

        def kept(mark: re.Match[str]) -> str:
            return mark[0] if mark[1] in self._images else mark[0].replace(MARK, "\ufffd")

        return {**message, "content": PATTERN.sub(kept, content)}

    async def ask(self, ask: Ask) -> Reply:
        """The policy's next turn. A client that went away and asks the same again gets what it has missed."""
        missed = self._missed[ask.key] if self._missed else None
        if missed:
            reply = missed.pop()
        else:
            number = next(self._numbers)
            self._worked += self.idle_seconds
            reply = self._pending[number] = asyncio.get_running_loop().create_future()
            reply.add_done_callback(lambda done: self._note(ask, done))
            images, self._unsent = self._unsent, {}
            self._send(number, ask, images)
        try:
            return await asyncio.shield(reply)
        except asyncio.CancelledError:
            self._missed[ask.key].append(reply)
            raise

    def receive(self, number: int, reply: Reply):
        """Takes the reply to a request."""
        future = self._pending.pop(number, None)
        if future is not None and not future.done():
            future.set_result(reply)
        self._idle_since = asyncio.get_running_loop().time()

    def _note(self, ask: Ask, done: asyncio.Future[Reply]):
        if done.cancelled() or done.exception() is not None:
            return
        reply = done.result()
        if reply.turn is not None:
            self.answered.append((ask, reply))
            return
        self.refused += reply.is_budget
        self._without_turn += 1
        if self._without_turn >= MAX_REFUSED:
            self.spent.set()

    def conversations(self) -> list[list[Message]]:
        """The messages of each branch: every request with its answer that no later one continues. Texts have the names
        of images."""
        whole = [[*ask.messages, reply.message] for ask, reply in self.answered]
        paths = [digests(messages) for messages in whole]
        inner = {digest for path in paths for digest in path[:-1]}
        return [shown(messages) for messages, path in zip(whole, paths, strict=True) if path[-1] not in inner]

    def close(self, error: Exception | None = None):
        """Ends the requests that wait. `error`: what they get; None: their connections are closed."""
        for future in self._pending.values():
            if error is None:
                future.cancel()
            elif not future.done():
                future.set_exception(error)
        self._pending.clear()
