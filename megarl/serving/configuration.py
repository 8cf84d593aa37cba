"""The configuration of the HTTP process: the checked flags of the server, and what rank 0 adds to them."""

import contextlib
import importlib.util
import ipaddress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from megarl import bundled
from megarl.data.conversations import Encoder
from megarl.data.detokenizer import Vocabulary
from megarl.errors import UsageError, warn_as_first
from megarl.flags.serving import Serving
from megarl.plain_files import read_text, reading
from megarl.tool_formats import FORMATS
from megarl.tool_formats.chosen_format import AUTO, FALLBACK, name_of, unread_calls
from megarl.tool_formats.thinking_budget import ThoughtReader

if TYPE_CHECKING:  # it imports torch
    from megarl.arguments import RunConfig, Settings

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")  # of the extra `serve`
MIN_KEY_LENGTH = 16  # characters


@dataclass(frozen=True)
class FrontendConfig:
    """All that the HTTP process needs to know."""

    encoder: Encoder
    max_model_length: int  # tokens of prompt and response together
    max_response_length: int  # default and limit of `max_tokens`
    settings: Serving = Serving()
    api_keys: list[str] = field(default_factory=list)  # none: no key is needed
    admin_keys: list[str] = field(default_factory=list)  # none: there is no /admin
    model_name: str = ""
    tool_format: str = FALLBACK
    thinking_text: str | None = None  # that ends thoughts after a budget; None: the default of the format
    vocab_size: int = 0
    replicas: int = 1
    ranks_address: str | tuple[str, int] = ""  # a Unix socket's path, or host and port (0: any)


Keys = tuple[list[str], list[str]]  # of `--api-key-file` and `--admin-key-file`


def check_server_flags(config: "RunConfig") -> Keys:
    """Checks flags of a server before any tokenizer or model is read; returns the keys. UsageError for wrong ones."""
    s, rollout = config.settings, config.roles["rollout"].megatron
    api_keys = check_listening(s)
    admin_keys = _read_keys("--admin-key-file", s.admin_key_file)
    if s.weights_folder is not None and not Path(s.weights_folder).is_dir():
        raise UsageError(f"--weights-folder {s.weights_folder}: no such folder")
    if s.weights_folder is not None and not admin_keys:
        raise UsageError(f"--weights-folder {s.weights_folder}: needs --admin-key-file, whose keys /admin asks for")
    if s.environment is None and not _is_built_in(s.tool_call_parser):
        allowed = ", ".join([AUTO, *FORMATS])
        raise UsageError(f"--tool-call-parser {s.tool_call_parser}: a server has {allowed}, and no plug-ins")
    if s.serve_routes:
        from megarl.mcore.model.pipeline_layout import RoutedLayers  # imports Megatron

        if not RoutedLayers.of(rollout).experts or rollout.pipeline_model_parallel_size > 1:
            raise UsageError("--serve-routes: needs a model with experts (--num-experts) on one pipeline stage")
    return api_keys, admin_keys


def check_listening(settings: "Settings") -> list[str]:
    """Checks packages and address of a process that listens; returns the keys of `--api-key-file`. UsageError."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the server needs {', '.join(missing)}: run {bundled.install_command('serve')}")
    api_keys = _read_keys("--api-key-file", settings.api_key_file)
    if not _is_loopback(settings.host) and not api_keys:
        raise UsageError(f"--host {settings.host}: others can reach it; needs --api-key-file, or a loopback address")
    return api_keys


def frontend_config(config: "RunConfig", keys: Keys, encoder: Encoder) -> FrontendConfig:
    """The configuration of a server with these flags. `encoder`: of the policy."""
    s, (api_keys, admin_keys) = config.settings, keys
    name = s.tool_call_parser if _is_built_in(s.tool_call_parser) else AUTO  # the HTTP process has no code of users
    form = name_of(name, encoder.template)
    if problem := unread_calls(name, encoder.template):
        warn_as_first([f"{problem}, if clients offer tools"])
    if s.thinking_budget_text is not None:
        try:
            ThoughtReader(Vocabulary(encoder.tokenizer), FORMATS[form]).encode(s.thinking_budget_text)
        except ValueError as error:
            raise UsageError(f"--thinking-budget-text: {error}") from None
    return FrontendConfig(
        encoder=encoder,
        max_model_length=s.max_prompt_length + s.max_response_length,
        max_response_length=s.max_response_length,
        settings=Serving(**{each.name: getattr(s, each.name) for each in fields(Serving)}),
        api_keys=api_keys,
        admin_keys=admin_keys,
        tool_format=form,
        thinking_text=s.thinking_budget_text,
    )


def _is_built_in(parser: str) -> bool:
    return parser in (AUTO, *FORMATS)


def _read_keys(flag: str, path: str | None) -> list[str]:
    if path is None:
        return []
    with reading(f"{flag} {path}"):
        keys = [line.strip() for line in read_text(path).splitlines() if line.strip()]
    if not keys:
        raise UsageError(f"{flag} {path}: has no key; write one a line")
    if any(len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise UsageError(
            f"{flag} {path}: a key has fewer than {MIN_KEY_LENGTH} characters, or others than letters, digits and signs"
        )
    return keys


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
