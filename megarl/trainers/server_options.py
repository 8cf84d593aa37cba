"""Who may ask a generation server, and how much: the checked flags of the server, for its HTTP process."""

import contextlib
import importlib.util
import ipaddress
from pathlib import Path

from megarl.arguments import RunConfig
from megarl.errors import UsageError
from megarl.serving.configuration import FrontendConfig

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")  # of the extra `serve`
SHORTEST_KEY = 16  # characters


class ServerOptions:
    """Keys, address and limits of a server, checked before any work starts. UsageError for wrong ones."""

    def __init__(self, config: RunConfig):
        s = config.settings
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise UsageError(f"the server needs {', '.join(missing)}: install the extra `serve` (megarl[serve])")
        self.config = config
        self.api_keys = _read_keys("--api-key-file", s.api_key_file)
        self.admin_keys = _read_keys("--admin-key-file", s.admin_key_file)
        if not _is_loopback(s.host) and not self.api_keys:
            raise UsageError(f"--host {s.host}: others can reach it; needs --api-key-file, or a loopback address")
        if s.weights_folder is not None and not Path(s.weights_folder).is_dir():
            raise UsageError(f"--weights-folder {s.weights_folder}: no such folder")
        if s.weights_folder is not None and not self.admin_keys:
            raise UsageError(f"--weights-folder {s.weights_folder}: needs --admin-key-file, whose keys /admin asks for")
        rollout = config.roles["rollout"].megatron
        if s.serve_routes and (not rollout.num_experts or rollout.pipeline_model_parallel_size > 1):
            raise UsageError("--serve-routes: needs a model with experts (--num-experts) on one pipeline stage")

    def frontend_config(
        self, model_name: str, vocab_size: int, http_fd: int, wire_fd: int, key: bytes, replicas: int
    ) -> FrontendConfig:
        """What the HTTP process has to know.

        Args:
            vocab_size: the model's.
            http_fd, wire_fd: of the sockets that clients and leaders connect to.
            key: that leaders must know.
        """
        s, actor = self.config.settings, self.config.roles["actor"]
        return FrontendConfig(
            http_fd=http_fd,
            wire_fd=wire_fd,
            wire_key=key.hex(),
            replicas=replicas,
            model_name=model_name,
            tokenizer_type=actor.tokenizer_type,
            tokenizer_model=actor.tokenizer_model,
            chat_template=actor.chat_template,
            hf_folder=actor.hf_model is not None,
            vocab_size=vocab_size,
            max_model_length=s.max_prompt_length + s.max_response_length,
            max_response_length=s.max_response_length,
            api_keys=self.api_keys,
            admin_keys=self.admin_keys,
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
