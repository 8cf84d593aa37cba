"""What the generation server needs besides its ranks: checked inputs, the HTTP process, and changes of weights."""

import contextlib
import dataclasses
import importlib.util
import ipaddress
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megarl.arguments import RunConfig
from megarl.checkpoint import integrity
from megarl.checkpoint.pretrained import FactorWeights, PretrainedWeights, checkpoint_weights, folder_weights
from megarl.comm.role_mesh import RoleGroups, RoleMesh
from megarl.errors import UsageError
from megarl.mcore.model import gpt
from megarl.mcore.weights.hf.hf_model import read_model
from megarl.rollout.command_channel import CommandChannel
from megarl.rollout.rollout import Rollout
from megarl.serving.configuration import FrontendConfig
from megarl.serving.wire import LeaderLink
from megarl.trainers.policy import PolicyInputs

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")  # of the extra `serve`
SHORTEST_KEY = 16  # characters
END_SECONDS = 10.0  # that the HTTP process has to exit
BACKLOG = 1024  # connections that wait to be accepted


class ServerInputs(PolicyInputs):
    """Policy, keys and limits of a server, checked before any work starts. UsageError for wrong ones."""

    def __init__(self, config: RunConfig):
        s = config.settings
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            raise UsageError(f"the server needs {', '.join(missing)}: install the extra `serve` (megarl[serve])")
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
        super().__init__(config)
        path = self.checkpoint or Path(self.source()["hf_model"])
        self.label = path.name  # of the weights, in answers
        self.model_name = s.served_model_name or _model_name(path)

    def frontend_config(self, http_fd: int, wire_fd: int, key: bytes, replicas: int) -> FrontendConfig:
        """What the HTTP process has to know."""
        s, actor = self.config.settings, self.config.roles["actor"]
        return FrontendConfig(
            http_fd=http_fd,
            wire_fd=wire_fd,
            wire_key=key.hex(),
            replicas=replicas,
            model_name=self.model_name,
            tokenizer_type=actor.tokenizer_type,
            tokenizer_model=actor.tokenizer_model,
            chat_template=actor.chat_template,
            hf_folder=actor.hf_model is not None,
            vocab_size=self.vocab_size,
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


def _model_name(path: Path) -> str:
    """The name of a checkpoint's run, or of a Hugging Face folder."""
    path = path.resolve()
    return path.parents[1].name if path.parent.name == "checkpoints" else path.name


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


class WeightLoader:
    """Loads other weights into the served policy."""

    def __init__(
        self, config: RunConfig, inputs: ServerInputs, policy: gpt.ModelChunks, mesh: RoleMesh, rollout: Rollout
    ):
        self.role, self.inputs, self.policy, self.rollout = config.roles["actor"], inputs, policy, rollout
        self.groups = mesh["actor"].pg_collection

    def load(self, path: str):
        """Loads the weights of a checkpoint or a Hugging Face folder. A collective of the world.

        Raises:
            UsageError: on all ranks, if some rank cannot read them; the old weights stay.
        """
        weights, error = None, None
        try:
            weights = self._read(path)
        except UsageError as problem:
            error = str(problem)
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if any(errors):
            raise UsageError(next(filter(None, errors)))
        folder = getattr(weights, "folder", None)
        if folder is not None and (damaged := integrity.find_damage([folder])):
            raise UsageError(f"{folder}: damaged: {damaged[folder]}")
        weights.load(self.policy, self.groups)
        self.rollout.sync_weights()

    def _read(self, path: str) -> PretrainedWeights:
        known = self.role.hf_model
        if known is not None and (Path(path) / "config.json").is_file():
            model = read_model(path, "weights", self.role.megatron.seq_length)
            if model.flags != known.flags or model.vocab_size != known.vocab_size:
                raise UsageError(f"weights {path}: config.json describes another model than the server has")
            return folder_weights(dataclasses.replace(self.role, hf_model=model))
        weights = checkpoint_weights(path, "weights", self.role, self.inputs.vocab_size)
        lora = weights.lora if isinstance(weights, FactorWeights) else None
        if lora != self.inputs.rollout_role().lora:
            raise UsageError(f"weights {path}: the low-rank factors differ from those that the server was started with")
        return weights


class FrontendProcess:
    """The HTTP process as the ranks see it."""

    def __init__(self, channel: CommandChannel, url: str | None, process: subprocess.Popen | None):
        """`url`, `process`: on rank 0."""
        self.channel, self._url, self._process = channel, url, process
        self._signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note if process else signal.SIG_IGN)  # launchers send it to all ranks

    def _note(self, number: int, frame):
        if self._signals:
            os._exit(128 + number)
        self._signals.append(number)

    def is_draining(self) -> bool:
        """Whether rank 0 has got a signal: running requests end, then the server does."""
        return bool(self._signals)

    def announce(self, name: str):
        """Says on rank 0 where the server is."""
        if self._url:
            print(f"megarl: serving {name} at {self._url}", flush=True)

    def end(self):
        """Waits on rank 0 until the HTTP process has ended. RuntimeError if it failed."""
        if self._process is None:
            return
        self._process.stdin.close()
        if status := self._process.wait(END_SECONDS):
            raise RuntimeError(f"the HTTP process ended with status {status}")


@contextlib.contextmanager
def connect_frontend(config: RunConfig, inputs: ServerInputs, role_groups: RoleGroups) -> Iterator[FrontendProcess]:
    """Starts the HTTP process on rank 0 and connects each replica's leader with it. A collective of the world.

    Raises:
        UsageError: the address cannot be used.
    """
    process, shared, url = None, [None, None], None
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            process, url, *shared = _start(config, inputs, len(role_groups.replicas), stack)
        dist.broadcast_object_list(shared, src=0)
        link = LeaderLink.connect(*shared) if role_groups.is_leader else None
        frontend = FrontendProcess(CommandChannel(link, role_groups), url, process)
        yield frontend
        frontend.end()


def _start(config: RunConfig, inputs: ServerInputs, replicas: int, stack: contextlib.ExitStack):
    """(HTTP process, URL, address of the wire, its key)."""
    s = config.settings
    with _listen_http(s.host, s.port) as http, _listen_wire(stack) as wire:
        key = secrets.token_bytes(32)
        frontend = inputs.frontend_config(http.fileno(), wire.fileno(), key, replicas)
        process = subprocess.Popen(
            [sys.executable, "-m", "megarl.serving.frontend"], stdin=subprocess.PIPE,
            pass_fds=(http.fileno(), wire.fileno()),
        )  # fmt: skip
        stack.callback(_kill, process)
        process.stdin.write(frontend.to_json().encode() + b"\n")
        process.stdin.flush()
        host = f"[{s.host}]" if ":" in s.host else s.host
        address = wire.getsockname()
        return process, f"http://{host}:{http.getsockname()[1]}", address, key


def _kill(process: subprocess.Popen):
    """Ends the HTTP process; it first answers its requests that there are no ranks any more."""
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _listen_http(host: str, port: int) -> socket.socket:
    try:
        (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return socket.create_server(address, family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"--host {host} --port {port}: cannot listen there: {error.strerror or error}") from None


def _listen_wire(stack: contextlib.ExitStack) -> socket.socket:
    """A socket for the leaders: a Unix one in a private folder if all ranks are on this node."""
    if os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE")) == os.environ.get("WORLD_SIZE"):
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="megarl-"))
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(Path(folder) / "wire"))
        server.listen()
        return server
    return socket.create_server((socket.gethostbyname(os.environ["MASTER_ADDR"]), 0))
