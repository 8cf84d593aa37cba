"""Flags of the generation server (`python -m megarl.serve`, and `--serve-policy` of a training run)."""

import dataclasses
import re
from typing import Any

from megarl.flags.fields import flag, not_negative, positive

SERVE = "serve"
# Programs, and the condition in training.
BOTH: dict[str, Any] = {"programs": "rl serve", "when": "serve_policy"}
LISTENING: dict[str, Any] = {"programs": "rl serve", "when": "listens"}
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,199}")


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Generation server."""

    serve_policy: bool = flag(False, "answer requests with the policy between its updates, as megarl.serve does")
    host: str = flag("127.0.0.1", "address that the server listens on; non-loopback addresses need --api-key-file",
                     **LISTENING)  # fmt: skip
    port: int = flag(8000, "port that the server listens on; 0: a free one", lambda v: 0 <= v < 65536, "0 to 65535",
                     **LISTENING)  # fmt: skip
    served_model_name: str | None = flag(None, "name of the model in requests; default: that of its folder",
                                         lambda v: bool(MODEL_NAME.fullmatch(v)),
                                         "letters, digits and . _ / : -", **BOTH)  # fmt: skip
    api_key_file: str | None = flag(None, "file of the keys that clients must send, one a line", **LISTENING)
    admin_key_file: str | None = flag(None, "file of the keys for /admin, one a line; default: there is no /admin",
                                      programs=SERVE)  # fmt: skip
    weights_folder: str | None = flag(None, "folder from which /admin/weights may load; default: none may be loaded",
                                      programs=SERVE)  # fmt: skip
    serve_routes: bool = flag(False, "record expert routes, so that /generate can return them", programs=SERVE)
    max_queue: int = not_negative(1024, "requests that may wait for the ranks; further requests are refused", **BOTH)
    max_body_mb: float = positive(16.0, "largest body of a request, MiB", **LISTENING)
    max_choices: int = positive(64, "largest n of a request", **BOTH)
    max_stops: int = positive(16, "most stop strings of a request", **BOTH)
    max_top_logprobs: int = not_negative(20, "most likely tokens that a request may ask for at each position",
                                         **BOTH)  # fmt: skip
    request_timeout: float = positive(3600.0, "seconds that a request may take, its wait included", **BOTH)
    max_connections: int = positive(1024, "clients that may be connected; health checks and /admin find a place beside"
                                     " them", **LISTENING)  # fmt: skip
    connection_timeout: float = positive(60.0, "seconds that a client may take to send the head of a request, and its"
                                          " body", **LISTENING)  # fmt: skip
    drain_seconds: float = not_negative(30.0, "seconds that running requests have to end after SIGTERM or SIGINT",
                                        **BOTH)  # fmt: skip
