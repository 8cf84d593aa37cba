"""The real HTTP process with a scripted leader at the other end of its link, which stands for the ranks.

The process is a fork, since its imports take longer than most tests; `tests/programs/test_serve.py` starts it as ranks
do. The leader is a real peer on a real socket that says what is in `megarl.serving.replica_messages`; it has no model,
and answers what its script says. It runs in a thread, which is joined at the end.
"""

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe, get_context

import httpx
import openai

from megarl.child_process import Child, blocked
from megarl.data.conversations import Encoder, build_encoder
from megarl.data.tokenizers import build_tokenizer
from megarl.flags.serving import Serving
from megarl.serving import frontend, links
from megarl.serving import replica_messages as messages
from megarl.serving.app import build_app
from megarl.serving.configuration import FrontendConfig
from megarl.serving.context import ServingContext
from tests.helpers.texts import small_tokenizers
from tests.helpers.waiting import SAFETY_SECONDS

Script = Callable[["ScriptedLeader", messages.ToReplica], None]


class ScriptedLeader:
    """One replica's leader. `script(leader, message)` is called for each message; all messages are in `frames`."""

    def __init__(self, address, key: bytes, replica: int, script: Script, ready: dict):
        self.replica, self.script, self.frames = replica, script, []
        self._changed = threading.Condition()
        self.link = links.Link(links.connect(address, key), links.kinds_of(messages.ToReplica))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        first = {"replica": replica, "max_requests": 8, "capacity": 4096, "blocks": 99, "version": 0}
        ready = messages.Ready(**{**first, "label": "step_7", **ready})
        self.label = ready.label
        self.link.send(ready)

    def tokens(self, *updates, version: int = 0):
        """Sends updates, or their first fields, such as [id, tokens, logprobs, top, finish]."""
        made = [each and messages.RequestUpdate(*each) for each in updates]
        self.link.send(messages.Report(version, self.label, 50, updates=made))

    def wait_for(self, count: int, kind: type = messages.Generate) -> list:
        """The messages of a kind, once there are `count`."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._of(kind)) >= count, SAFETY_SECONDS), self.frames
            return self._of(kind)

    def wait_closed(self):
        """Waits until the frontend has closed the connection."""
        self._thread.join(SAFETY_SECONDS)
        assert not self._thread.is_alive()

    def close(self):
        """Ends the connection after what was sent, and the thread."""
        self.link.close(SAFETY_SECONDS)
        self._thread.join()

    def _of(self, kind: type) -> list:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def _run(self):
        with contextlib.suppress(ConnectionError):
            while True:
                for message in self.link.receive():
                    with self._changed:
                        self.frames.append(message)
                        self._changed.notify_all()
                    self.script(self, message)


def silent(leader: ScriptedLeader, frame: messages.ToReplica):
    """The script that answers nothing."""


class Answers:
    """A script: answers the prompt that ends with a key of `answers` with its text, token by token, then EOS.

    The log-prob of a token depends on the token alone, so that tests can compute it; `score` answers have the same.
    """

    def __init__(self, tokenizer, answers: dict[str, str], default: str = "Hello world"):
        self.tokenizer, self.answers, self.default = tokenizer, answers, default

    @staticmethod
    def logprob(token: int) -> float:
        return -0.5 - token / 1024

    def top(self, token: int, count: int):
        """Alternatives: the token itself, then the next ones."""
        return [[token + k, self.logprob(token + k)] for k in range(count)] if count else None

    def __call__(self, leader: ScriptedLeader, frame: messages.ToReplica):
        if isinstance(frame, messages.Generate):
            self._generate(leader, frame)
        elif isinstance(frame, messages.ScorePrompt):
            tokens, count = frame.prompt, frame.top_logprobs
            top = [None, *(self.top(token, count) for token in tokens[1:])] if count else None
            logprobs = [None, *map(self.logprob, tokens[1:])]
            leader.tokens(messages.RequestUpdate(frame.id, logprobs=logprobs, top=top, finish="scored"))
        elif isinstance(frame, messages.Control) and frame.command != "stop":
            leader.label = "step_9"
            leader.link.send(messages.Report(1, leader.label, 50, command=frame.number))

    def _generate(self, leader: ScriptedLeader, frame: messages.Generate):
        said = self.tokenizer.decode(frame.prompt)
        text = next((answer for key, answer in self.answers.items() if key in said), self.default)
        tokens = [*self.tokenizer.encode(text), self.tokenizer.eos_id]
        while self.tokenizer.eos_id not in frame.end_ids and len(tokens) < frame.max_tokens:
            tokens += tokens
        is_cut = len(tokens) > frame.max_tokens or self.tokenizer.eos_id not in frame.end_ids
        tokens = tokens[: frame.max_tokens]
        routes = {"shape": [1, 1, 1], "data": "AAA="} if frame.routes else None
        for position, token in enumerate(tokens):
            top = self.top(token, frame.top_logprobs)
            finish = ("length" if is_cut else "stop") if position == len(tokens) - 1 else None
            last = routes if finish else None
            leader.tokens(messages.RequestUpdate(frame.id, [token], [self.logprob(token)], top and [top], finish, last))


class _Forked(Child):
    """The HTTP process as a fork of this one, without its files, handlers of logs, and session."""

    def __init__(self, log):
        self.connection, theirs = Pipe()
        self._fork = get_context("fork").Process(target=self._run, args=(theirs, log), daemon=True)
        with theirs, blocked():
            self._fork.start()
        self.process = self
        self.pid = self._fork.pid

    @staticmethod
    def _run(theirs, log):
        os.setsid()
        kept = os.dup2(theirs.fileno(), 3)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(2, 1)
        os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
        sys.argv, sys.stderr = ["frontend", str(kept)], os.fdopen(2, "w", buffering=1)
        logging.root.handlers.clear()
        os._exit(frontend.main())

    def poll(self) -> int | None:
        return self._fork.exitcode

    def wait(self, timeout: float | None = None):
        self._fork.join(timeout)
        if self._fork.exitcode is None:
            raise subprocess.TimeoutExpired("frontend", timeout)


class Served:
    """A running HTTP process: `url`, `client` (httpx), `leaders`, `process`, `tokenizer`."""

    def __init__(self, folder, script=None, leaders: int = 1, ready: dict | None = None, family="unix", **settings):
        path = settings.pop("make_tokenizer", small_tokenizers.chatml)(folder / "tokenizer")
        self.tokenizer = build_tokenizer("HuggingFaceTokenizer", path)
        encoder = build_encoder(self.tokenizer, settings.pop("chat_template", "tokenizer"))
        defaults = dict(
            model_name="tiny", encoder=encoder,
            vocab_size=self.tokenizer.vocab_size, max_model_length=4096, max_response_length=512,
            replicas=leaders,
            ranks_address=str(folder / "leaders") if family == "unix" else ("127.0.0.1", 0),
        )  # fmt: skip
        flags = {name: settings.pop(name) for name in list(settings) if hasattr(Serving, name)}
        flags = Serving(**{"port": 0, "serve_routes": True, **flags})
        config = FrontendConfig(**{**defaults, **settings}, settings=flags)
        self.leaders: list[ScriptedLeader] = []
        self._log = folder / "stderr"
        self.process = _Forked(self._log)
        self.process.send(config)
        self.found = self.process.connection.recv()  # what is wrong with the configuration, if it is a text
        if isinstance(self.found, str):
            return
        self.url, self.address, self.key = self.found
        self.port = int(self.url.rpartition(":")[2])
        headers = {"Authorization": f"Bearer {config.api_keys[0]}"} if config.api_keys else {}
        self.client = httpx.Client(base_url=self.url, timeout=SAFETY_SECONDS, headers=headers)
        script = script or Answers(self.tokenizer, {})
        for replica in range(leaders):
            self.connect(replica, script, ready or {})
        if leaders:
            self.wait_ready()

    def connect(self, replica: int, script: Script = silent, ready: dict | None = None) -> ScriptedLeader:
        leader = ScriptedLeader(self.address, self.key, replica, script, ready or {})
        self.leaders.append(leader)
        return leader

    def wait_ready(self):
        """Waits until /ready says so, asking again and again: it has no other sign."""
        while self.client.get("/ready").status_code != 200:
            assert self.process.lives(), self._log.read_text()

    def post(self, path: str, **body) -> httpx.Response:
        return self.client.post(path, json=body)

    def events(self, path: str, **body) -> list[dict]:
        """The events of a stream; the last, [DONE], is checked and left out."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]

    def exit_status(self) -> int:
        return self.process.status(SAFETY_SECONDS)

    @property
    def stderr(self) -> str:
        return self._log.read_text()

    def close(self):
        if not isinstance(self.found, str):
            self.client.close()
        if self.process.lives():
            self.process.end()
        for leader in self.leaders:
            leader.close()


@contextlib.contextmanager
def stderr_in(path):
    """What is written to file descriptor 2 meanwhile, and by processes that are started, goes into a file."""
    saved = os.dup(2)
    try:
        with open(path, "wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


@contextlib.contextmanager
def served(folder, script=None, **settings):
    server = Served(folder, script, **settings)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def answering(folder, answers: dict[str, str], **settings):
    """A server for the tests of a module, whose policy gives these answers; in the end it has written no line."""
    with served(folder, **settings) as server:
        server.leaders[0].script = Answers(server.tokenizer, answers)
        yield server
    assert server.stderr == ""


def openai_client(server: Served) -> openai.OpenAI:
    """OpenAI's client of a server without keys, as a context."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=SAFETY_SECONDS, max_retries=0)


# -- the application without leaders and without a process -------------------------------------------------------------


def without_leaders(folder, encoder: Encoder | None = None) -> ServingContext:
    """The state of a server to which no leader has come. `encoder`: None: of a tokenizer without a template."""
    if encoder is None:
        path = small_tokenizers.chatml(folder / "tokenizer")
        encoder = Encoder(build_tokenizer("HuggingFaceTokenizer", path))
    return ServingContext(FrontendConfig(encoder, 100, 100, vocab_size=304))


def posted(context: ServingContext, **body) -> httpx.Response:
    async def post():
        transport = httpx.ASGITransport(build_app(context))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/v1/completions", json=body)

    return asyncio.run(post())
