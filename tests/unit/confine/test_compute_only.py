"""What a process that confines itself to computing cannot do, and that a filter that does not hold is noticed."""

from megarl.confine import compute_only


def test_a_confined_process_can_only_compute():
    assert compute_only.works() is None


def test_a_filter_that_does_not_hold_is_noticed(monkeypatch):
    monkeypatch.setattr(compute_only, "_filter_calls", lambda *_: None)
    assert "a process could be started" in compute_only.works()
    monkeypatch.setattr(compute_only, "_ALLOWED", {})
    assert "no list of system calls" in compute_only.works()
