"""The configuration of the HTTP process: the checked flags of the server, and what rank 0 adds to them."""

import contextlib
import importlib.util
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.data.conversations import Encoder, build_encoder
from megarl.data.tokenizers import build_tokenizer
from megarl.errors import UsageError

if TYPE_CHECKING:  # it imports torch
    from megarl.arguments import RunConfig

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")  # of the extra `serve`
SHORTEST_KEY = 16  # characters


@dataclass(frozen=True)
class FrontendConfig:
    """All that the HTTP process needs to know.

    Attributes:
        host, port: where clients connect; port 0: any.
        chat_template: value of --chat-template.
        hf_folder: the tokenizer's own template is the default, as it is for a model from a Hugging Face folder.
        max_model_length: tokens of prompt and response together.
        max_response_length: default and limit of `max_tokens`.
        api_keys, admin_keys: allowed keys; no API key: no key is needed; no admin key: there is no /admin.
        weights_folder: /admin/weights loads only from inside.
        routes: the ranks record expert routes.
        max_queue: requests that wait because the replicas are full.
        max_choices: limit of `n`.
        max_stops: limit of stop strings.
        request_timeout: seconds that a request may take.
        drain_seconds: time that running requests get at the end.
        model_name: of the served policy.
        vocab_size: ids of prompts are smaller.
        replicas: how many leaders will connect.
        ranks_address: where they do: the path of a Unix socket, or host and port (0: any).
    """

    tokenizer_type: str
    tokenizer_model: str | None
    max_model_length: int
    max_response_length: int
    host: str = "127.0.0.1"
    port: int = 0
    chat_template: str | None = None
    hf_folder: bool = False
    api_keys: list[str] = field(default_factory=list)
    admin_keys: list[str] = field(default_factory=list)
    weights_folder: str | None = None
    routes: bool = False
    max_queue: int = 1024
    max_body_bytes: int = 16 * 2**20
    max_choices: int = 128
    max_stops: int = 16
    max_top_logprobs: int = 20
    request_timeout: float = 3600.0
    drain_seconds: float = 30.0
    model_name: str = ""
    vocab_size: int = 0
    replicas: int = 1
    ranks_address: str | tuple[str, int] = ""

    def load_encoder(self) -> Encoder:
        """Reads the tokenizer and its chat template, as the training programs do. Raises UsageError."""
        tokenizer = build_tokenizer(self.tokenizer_type, self.tokenizer_model)
        folder = f"--tokenizer-model {self.tokenizer_model}" if self.hf_folder else None
        return build_encoder(tokenizer, self.chat_template, folder=folder)


def read_server_flags(config: "RunConfig") -> FrontendConfig:
    """Keys, address and limits of a server, checked before any work starts. UsageError for wrong ones."""
    s, actor, rollout = config.settings, config.roles["actor"], config.roles["rollout"].megatron
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the server needs {', '.join(missing)}: install the extra `serve` (megarl[serve])")
    api_keys = _read_keys("--api-key-file", s.api_key_file)
    admin_keys = _read_keys("--admin-key-file", s.admin_key_file)
    if not _is_loopback(s.host) and not api_keys:
        raise UsageError(f"--host {s.host}: others can reach it; needs --api-key-file, or a loopback address")
    if s.weights_folder is not None and not Path(s.weights_folder).is_dir():
        raise UsageError(f"--weights-folder {s.weights_folder}: no such folder")
    if s.weights_folder is not None and not admin_keys:
        raise UsageError(f"--weights-folder {s.weights_folder}: needs --admin-key-file, whose keys /admin asks for")
    if s.serve_routes and (not rollout.num_experts or rollout.pipeline_model_parallel_size > 1):
        raise UsageError("--serve-routes: needs a model with experts (--num-experts) on one pipeline stage")
    return FrontendConfig(
        tokenizer_type=actor.tokenizer_type,
        tokenizer_model=actor.tokenizer_model,
        max_model_length=s.max_prompt_length + s.max_response_length,
        max_response_length=s.max_response_length,
        host=s.host,
        port=s.port,
        chat_template=actor.chat_template,
        hf_folder=actor.hf_model is not None,
        api_keys=api_keys,
        admin_keys=admin_keys,
        weights_folder=s.weights_folder and str(Path(s.weights_folder).resolve()),
        routes=s.serve_routes,
        max_queue=s.max_queue,
        max_body_bytes=int(s.max_body_mb * 2**20),
        max_choices=s.max_choices,
        max_stops=s.max_stops,
        max_top_logprobs=s.max_top_logprobs,
        request_timeout=s.request_timeout,
        drain_seconds=s.drain_seconds,
    )


def _read_keys(flag: str, path: str | None) -> list[str]:
    if path is None:
        return []
    try:
        keys = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {path}: cannot be read ({error.__class__.__name__})") from None
    if not keys:
        raise UsageError(f"{flag} {path}: has no key; write one a line")
    if any(len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise UsageError(
            f"{flag} {path}: a key has fewer than {SHORTEST_KEY} characters, or others than letters, digits and signs"
        )
    return keys


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
