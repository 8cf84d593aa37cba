"""The configuration of the HTTP process, which rank 0 sends as one line of JSON."""

import dataclasses
import json
from dataclasses import dataclass, field

from megarl.data.conversations import Encoder, build_encoder
from megarl.data.tokenizers import build_tokenizer


@dataclass(frozen=True)
class FrontendConfig:
    """All that the HTTP process needs to know.

    Attributes:
        http_fd, wire_fd: file descriptors of the listening sockets of clients and of leaders.
        wire_key: 32 bytes in hexadecimal, which leaders must know.
        replicas: how many leaders will connect.
        chat_template: value of --chat-template.
        hf_folder: the tokenizer's own template is the default, as it is for a model from a Hugging Face folder.
        vocab_size: ids of prompts are smaller.
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
    """

    http_fd: int
    wire_fd: int
    wire_key: str
    replicas: int
    model_name: str
    tokenizer_type: str
    tokenizer_model: str
    vocab_size: int
    max_model_length: int
    max_response_length: int
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

    def to_json(self) -> str:
        """One line of JSON, without the line break."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> "FrontendConfig":
        """The configuration of a line of JSON; ValueError or TypeError for anything else."""
        return cls(**json.loads(line))

    def load_encoder(self) -> Encoder:
        """Reads the tokenizer and its chat template, as the training programs do. Raises UsageError."""
        tokenizer = build_tokenizer(self.tokenizer_type, self.tokenizer_model)
        folder = f"--tokenizer-model {self.tokenizer_model}" if self.hf_folder else None
        return build_encoder(tokenizer, self.chat_template, folder=folder)
