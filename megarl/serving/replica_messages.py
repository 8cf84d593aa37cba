"""What the HTTP process and the replicas say to each other, over the links of the replicas' leaders (`links.py`)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

# -- to all ranks of a replica -----------------------------------------------------------------------------------------


class Generate(NamedTuple):
    """Generate a response. `id`, which `ReplicaPool` sets, names it in what follows."""

    prompt: list[int]
    key: int  # of its random stream
    max_tokens: int
    temperature: float
    greedy: bool
    top_k: int  # 0: all tokens
    top_p: float
    min_p: float
    end_ids: list[int]
    stops: list[str]  # texts that end it, whose tokens stay in it
    thinking: tuple[int, list[int], str] | None  # limit of thoughts, tokens that end them there, name of the format
    top_logprobs: int
    routes: bool
    id: int = 0
    images: Sequence[str] = ()  # that the prompt's tokens name, base64 of their bytes


class ScorePrompt(NamedTuple):
    """Compute the log-probs of the tokens of a prompt, under the temperature-scaled policy."""

    prompt: list[int]
    temperature: float
    top_logprobs: int
    id: int = 0


class Abort(NamedTuple):
    """The HTTP process no longer waits for these requests."""

    ids: list[int]


class Control(NamedTuple):
    """Run a command: "pause" with a mode, "resume", "weights" with a path; or "stop", which nobody answers."""

    command: str
    number: int = 0
    mode: str | None = None
    path: str | None = None


Request = Generate | ScorePrompt
ToReplica = Generate | ScorePrompt | Abort | Control

# -- from the leader of a replica --------------------------------------------------------------------------------------


class Ready(NamedTuple):
    """The first message: which replica it is, and what it can hold."""

    replica: int
    max_requests: int
    capacity: int  # tokens of a request
    blocks: int  # free ones of the cache
    version: int  # of the policy
    label: str  # of its weights


class RequestUpdate(NamedTuple):
    """What there is of one request since its last update; `tokens`, `logprobs` and `top` are equally many.

    A prompt's scores have no `tokens`, and None for the first one. `finish`: "stop", "length", "abort" or "scored".
    """

    id: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    top: Sequence[Sequence[tuple[int, float]] | None] | None = None
    finish: str | None = None
    routes: dict[str, Any] | None = None  # with the last one: shape and base64 data
    error: str | None = None  # why the replica refuses the request
    version: int = 0  # of the policy; the HTTP process adds it, and the label of its weights
    label: str = ""

    @property
    def is_last(self) -> bool:
        """Whether nothing follows for this request."""
        return self.finish is not None or self.error is not None

    @property
    def fingerprint(self) -> str:
        """Which weights generated the tokens, as `system_fingerprint`."""
        return f"{self.label}-v{self.version}"


class Report(NamedTuple):
    """The state of a replica, and what a step or a command has brought."""

    version: int  # of the policy
    label: str  # of its weights
    blocks: int  # free ones of the cache
    is_open: bool = True  # whether it answers requests now; the policy of a training run does at times
    updates: Sequence[RequestUpdate] = ()
    command: int | None = None  # number of the one that has been run
    error: str | None = None  # why it could not be


class Drain(NamedTuple):
    """The server is to end when its requests have."""


ToFrontend = Ready | Report | Drain
