"""The HTTP process as the ranks see it, when it does not end."""

from types import SimpleNamespace

import pytest

from megarl.serving.frontend_process import END_SECONDS, FrontendProcess
from megarl.serving.replica_messages import Control, Drain, ToFrontend, ToReplica

STOP = Control("stop")


class SilentLink:
    """A link whose peer is stopped after some messages: it says nothing more, and does not close."""

    def __init__(self, messages: list[ToReplica]):
        self.messages = messages

    def receive(self, seconds: float) -> list[ToReplica]:
        messages, self.messages = self.messages, []
        return messages

    def send(self, message: ToFrontend):
        """Nobody reads it."""


def frontend(may_end: bool, drain_seconds: float, *messages: ToReplica) -> FrontendProcess:
    groups = SimpleNamespace(replica=[0])
    return FrontendProcess("url", SilentLink(list(messages)), None, groups, may_end, drain_seconds)


def test_a_process_that_does_not_end_is_an_error_of_a_server():
    process = frontend(False, -END_SECONDS)
    assert process.receive(0.0) == []
    process.send(Drain())
    with pytest.raises(ConnectionError, match="the HTTP process is gone: it has not ended 0 s after it was told to"):
        process.receive(0.0)


def test_a_training_run_ends_without_it(capsys):
    process = frontend(True, -END_SECONDS)
    process.send(Drain())
    assert process.receive(0.0) == [STOP] and process.receive(0.0) == []
    assert capsys.readouterr().err.count("the run goes on without the server") == 1


def test_what_came_while_the_engine_was_busy_counts():
    process = frontend(False, -END_SECONDS, STOP)
    process.send(Drain())
    assert process.receive(0.0) == [STOP]


def test_until_then_it_has_time():
    process = frontend(False, 1e9)
    process.send(Drain())
    assert process.receive(0.0) == []
