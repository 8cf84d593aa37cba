"""The start of the HTTP process."""

import pickle
import socket
import subprocess
import sys
from multiprocessing.connection import Client

import pytest

from megarl.data.conversations import build_encoder
from megarl.data.prompt import Prompt
from megarl.data.tokenizers import build_tokenizer
from megarl.serving.configuration import FrontendConfig
from tests.helpers.server.serving import Answers, served
from tests.helpers.texts import small_tokenizers


def test_a_port_in_use_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with served(tmp_path, leaders=0, port=port) as server:
            assert server.exit_status() == 2 and f"--port {port}: cannot listen there" in server.found


def test_strangers_among_the_leaders_change_nothing(tmp_path):
    with served(tmp_path, family="inet", leaders=0, replicas=1) as server:
        with socket.create_connection(server.address), Client(server.address) as stranger:
            stranger.send_bytes(bytes(48))
            with pytest.raises((EOFError, OSError)):
                [stranger.recv_bytes() for _ in range(3)]
            server.connect(0, Answers(server.tokenizer, {}))
            server.wait_ready()
            assert server.post("/v1/completions", prompt="a").status_code == 200
    assert "a connection of the ranks was refused" in server.stderr


def test_the_http_process_loads_neither_torch_nor_megatron(tmp_path):
    """Rank 0 sends the tokenizer and the template that it has read."""
    tokenizer = build_tokenizer("HuggingFaceTokenizer", small_tokenizers.llama(tmp_path / "a"))
    encoder = build_encoder(tokenizer, "tokenizer")
    sent = pickle.dumps((FrontendConfig(encoder, 100, 100), encoder.prompt(Prompt(0, "Hello <|eot_id|>"))))
    code = (
        "import pickle, sys, megarl.serving.frontend\n"
        "from megarl.data.prompt import Prompt\n"
        "config, tokens = pickle.load(sys.stdin.buffer)\n"
        "assert config.encoder.prompt(Prompt(0, 'Hello <|eot_id|>')) == tokens\n"
        "print({'torch', 'megatron', 'transformers'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True)
    assert found.stdout == b"set()\n", found.stderr
