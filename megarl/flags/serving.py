"""Flags of the generation server (`python -m megarl.serve`, and `--serve-policy` of a training run)."""

import dataclasses
import re
from collections.abc import Iterator

from megarl.flags.conditions import SERVES, Broken, Condition, FlagContext
from megarl.flags.fields import flag, not_negative, positive

BOTH, SERVE = "rl serve", "serve"
LISTENS = Condition(
    lambda run: SERVES.holds(run) or run.settings.agent_sessions, "needs --serve-policy or --agent-sessions"
)
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,199}")


@dataclasses.dataclass(frozen=True)
class Serving:
    """Generation server."""

    serve_policy: bool = flag(False)
    """answer requests with the policy between its updates, as megarl.serve does"""
    host: str = flag("127.0.0.1", programs=BOTH, when=LISTENS)
    """address that the server listens on; non-loopback addresses need --api-key-file"""
    port: int = flag(8000, lambda v: 0 <= v < 65536, "0 to 65535", programs=BOTH, when=LISTENS)
    """port that the server listens on; 0: a free one"""
    served_model_name: str | None = flag(
        None, lambda v: bool(MODEL_NAME.fullmatch(v)), "letters, digits and . _ / : -", programs=BOTH, when=SERVES
    )
    """name of the model in requests; default: that of its folder"""
    api_key_file: str | None = flag(None, programs=BOTH, when=LISTENS)
    """file of the keys that clients must send, one a line"""
    admin_key_file: str | None = flag(None, programs=SERVE)
    """file of the keys for /admin, one a line; default: there is no /admin"""
    weights_folder: str | None = flag(None, programs=SERVE)
    """folder from which /admin/weights may load; default: none may be loaded"""
    serve_routes: bool = flag(False, programs=SERVE)
    """record expert routes, so that /generate can return them"""
    max_queue: int = not_negative(1024, programs=BOTH, when=SERVES)
    """requests that may wait for the ranks; further requests are refused"""
    max_body_mb: float = positive(16.0, programs=BOTH, when=LISTENS)
    """largest body of a request, MiB"""
    max_choices: int = positive(64, programs=BOTH, when=SERVES)
    """largest n of a request"""
    max_stops: int = positive(16, programs=BOTH, when=SERVES)
    """most stop strings of a request"""
    max_top_logprobs: int = not_negative(20, programs=BOTH, when=SERVES)
    """most likely tokens that a request may ask for at each position"""
    request_timeout: float = positive(3600.0, programs=BOTH, when=SERVES)
    """seconds that a request may take, its wait included"""
    max_connections: int = positive(1024, programs=BOTH, when=LISTENS)
    """clients that may be connected; health checks and /admin find a place beside them"""
    connection_timeout: float = positive(60.0, programs=BOTH, when=LISTENS)
    """seconds that a client may take to send the head of a request, and its body"""
    drain_seconds: float = not_negative(30.0, programs=BOTH, when=SERVES)
    """seconds that running requests have to end after SIGTERM or SIGINT"""


def rules(run: FlagContext) -> Iterator[Broken]:
    """Rules of a training run that serves its policy."""
    s = run.settings
    if s.serve_policy and s.debug_train_only:
        yield "--serve-policy", "not allowed with --debug-train-only, which has no rollout engine"
