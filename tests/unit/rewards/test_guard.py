"""Time limits by alarms: none is lost, late, or takes another one away."""

import gc
import signal
import time

import pytest

from megarl.rewards import guard
from tests.helpers.waiting import SAFETY_SECONDS


def spin(seconds: float):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_an_alarm_leaves_the_earlier_one():
    rung = []
    earlier = signal.signal(signal.SIGALRM, lambda *_: rung.append("earlier"))
    try:
        signal.setitimer(signal.ITIMER_REAL, SAFETY_SECONDS)
        with pytest.raises(TimeoutError, match="no result within 0.1 s"):
            guard.call(spin, SAFETY_SECONDS, 0.1)
        assert guard.call(len, "abc", SAFETY_SECONDS) == 3 and not rung
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= SAFETY_SECONDS - 0.1  # less the time spent
        signal.setitimer(signal.ITIMER_REAL, 0.05)  # falls due within: rings right after
        guard.call(spin, 0.1, SAFETY_SECONDS)
        assert (rung, signal.getitimer(signal.ITIMER_REAL)) == (["earlier"], (0.0, 0.0))
        with pytest.raises(ZeroDivisionError):
            guard.call(lambda x: 1 / x, 0, SAFETY_SECONDS)
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


@pytest.fixture
def no_finalizers():
    """No object of earlier tests: an alarm in one is reported there, and comes again a moment later."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_no_alarm_is_ever_lost_or_late(monkeypatch, no_finalizers):
    """Alarms at all instants of a call, a repetition of them included: none is seen outside of it."""
    monkeypatch.setattr(guard, "_REPEAT", 3e-4)
    late = 0
    for number in range(2000):
        try:
            assert guard.call(sum, range(1000), 1e-6 + number * 2e-8) == 499500
        except TimeoutError:
            late += 1
    assert late and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
