"""A machine that allows no sandbox for agents."""

import pytest

from megarl.confine import agent_sandbox
from megarl.errors import UsageError


def test_a_machine_without_a_sandbox_is_said(monkeypatch):
    monkeypatch.setattr(agent_sandbox, "_PROBE", "raise SystemExit('the network cannot be shut off here')")
    agent_sandbox.check_sandbox.cache_clear()
    with pytest.raises(UsageError, match="no sandbox for agents: the network cannot be shut off here"):
        agent_sandbox.check_sandbox()
