"""The socket on which an HTTP process listens."""

import socket

import pytest

from megarl.errors import UsageError
from megarl.flags.serving import Serving
from megarl.serving.listening import listen_to_clients


def test_connections_send_the_parts_of_an_answer_at_once():
    http, url = listen_to_clients(Serving(port=0))
    with http, socket.create_connection(url.removeprefix("http://").split(":")):
        connection, _ = http.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        with pytest.raises(UsageError, match="cannot listen there"):
            listen_to_clients(Serving(port=http.getsockname()[1]))
