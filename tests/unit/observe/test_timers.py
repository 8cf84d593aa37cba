"""Phase times, their reduction over ranks, and the trace file."""

import json
import pickle
import threading
import time

import pytest

from megarl.observe import timers as timers_module
from megarl.observe.timers import STEP, Timers, TraceEvent, reduce_times, write_timeline


class _Clock:
    """Replaces the process's clocks: time is constant unless a test moves it."""

    def __init__(self):
        self.now_ns = 1_000

    def perf_counter_ns(self):
        return self.now_ns

    def time_ns(self):
        return self.now_ns + 50_000

    def sleep(self, seconds):
        self.now_ns += int(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch):
    clock = _Clock()
    monkeypatch.setattr(timers_module, "time", clock)
    return clock


def test_phases_accumulate_and_reset(clock):
    timers = Timers()
    clock.sleep(100)  # set-up belongs to no step
    for _ in range(2):
        with timers.phase("actor", "rollout"):
            clock.sleep(2)
    clock.sleep(1)
    assert timers.end_step() == {("actor", "rollout"): 4.0, STEP: 5.0}
    clock.sleep(3)  # between two steps: counts for the next one
    with timers.phase("critic", "values"):
        clock.sleep(1)
    assert timers.end_step() == {("critic", "values"): 1.0, STEP: 4.0}


def test_an_evaluation_has_phases_of_its_own(clock):
    timers = Timers()
    with timers.phase("actor", "rollout"):
        clock.sleep(2)
    with pytest.raises(ValueError), timers.evaluation(), timers.phase("actor", "rollout"):
        clock.sleep(4)
        raise ValueError
    assert timers.current() == ("actor", "eval_rollout")
    with timers.evaluation(), timers.phase("reward", "exchange"):
        clock.sleep(1)
    with timers.phase("actor", "rollout"):
        clock.sleep(8)
    times = timers.end_step()
    assert times == {("actor", "rollout"): 10.0, ("actor", "eval_rollout"): 4.0, ("reward", "eval_exchange"): 1.0,
                     STEP: 15.0}  # fmt: skip
    assert reduce_times([times], [["actor", "reward"]])["time/idle_fraction"] == pytest.approx(1 / 15)


def test_nested_phases_add_up_to_the_step(clock):
    timers = Timers()
    with timers.phase("actor", "update"):
        clock.sleep(1)
        with timers.phase("actor", "exchange"):
            clock.sleep(2)
            with timers.phase("critic", "values"):
                clock.sleep(4)
        clock.sleep(8)
    times = timers.end_step()
    assert times == {("actor", "update"): 9.0, ("actor", "exchange"): 2.0, ("critic", "values"): 4.0, STEP: 15.0}


def test_current_names_the_innermost_phase_and_the_failed_one():
    timers = Timers()
    assert timers.current() is None
    with timers.phase("actor", "update"):
        with timers.phase("actor", "exchange"):
            seen = []
            thread = threading.Thread(target=lambda: seen.append(timers.current()))
            thread.start()
            thread.join()
            assert seen == [("actor", "exchange")]
        assert timers.current() == ("actor", "update")
    assert timers.current() is None
    with pytest.raises(RuntimeError), timers.phase("critic", "update"), timers.phase("critic", "wait"):
        raise RuntimeError
    assert timers.current() == ("critic", "wait")
    times = timers.end_step()
    assert {("critic", "update"), ("critic", "wait")} <= set(times) and timers.current() is None


def test_current_seconds_count_from_the_begin_of_the_phase_or_the_end_of_the_last_one(clock):
    timers, seen = Timers(), []

    def look(seconds):
        clock.sleep(seconds)
        seen.append(timers.current_seconds())

    look(1)
    with timers.phase("actor", "update"):
        look(2)
        with timers.phase("actor", "exchange"):
            look(4)
        look(8)
    look(16)
    timers.end_step()
    look(32)
    assert seen == [1, 2, 4, 14, 16, 32]


def test_end_step_inside_a_phase_is_rejected():
    timers = Timers()
    with timers.phase("actor", "update"), pytest.raises(RuntimeError, match="actor/update"):
        timers.end_step()


def test_real_clock_measures_wall_seconds():
    begin = time.time_ns()
    timers = Timers()
    before = time.time_ns()
    with timers.phase("actor", "rollout"):
        time.sleep(0.02)
    after = time.time_ns()
    times = timers.end_step()
    assert 0.02 <= times["actor", "rollout"] <= times[STEP]
    event = timers.events()[0]
    # The two clocks may drift apart a little, and were read one after the other.
    slack = 50_000_000 + before - begin
    assert before - slack <= event.start_ns and event.start_ns + event.duration_ns <= after + slack


def test_trace_keeps_the_latest_events(clock, monkeypatch):
    monkeypatch.setattr("megarl.observe.timers.MAX_EVENTS", 4)
    timers = Timers()
    for step in range(1, 6):
        with timers.phase("actor", "rollout"):
            clock.sleep(1)
        timers.end_step(step)
    assert [event.name for event in timers.events()] == ["actor/rollout", "step 4", "actor/rollout", "step 5"]
    assert timers.events()[-1].start_ns == 51_000 + 4_000_000_000 and timers.events()[-1].duration_ns == 10**9


def test_reduction_over_ranks():
    # Ranks 0-1 actor, rank 2 critic and reward (colocated), rank 3 no role.
    roles_of_rank = [{"actor"}, {"actor"}, {"critic", "reward"}, set()]
    times_of_rank = [
        {("actor", "update"): 6.0, ("actor", "wait"): 3.0, STEP: 10.0},
        {("actor", "update"): 8.0, ("actor", "exchange"): 1.0, ("critic", "values"): 1.5, STEP: 10.0},
        {("critic", "values"): 1.0, ("reward", "score"): 3.0, ("actor", "update"): 5.0, STEP: 8.0},
        {STEP: 11.0},
    ]
    assert reduce_times(times_of_rank, roles_of_rank) == {
        "time/step_s": 11.0,
        "time/actor/update_s": 8.0,
        "time/actor/wait_s": 3.0,
        "time/actor/exchange_s": 1.0,
        "time/actor/idle_fraction": pytest.approx((0.4 + 0.2) / 2),
        "time/critic/values_s": 1.0,  # rank 1 is no member of the critic
        "time/critic/idle_fraction": pytest.approx(0.5),  # busy 1 + 3 of 8 seconds
        "time/reward/score_s": 3.0,
        "time/reward/idle_fraction": pytest.approx(0.5),
        "time/idle_fraction": pytest.approx((0.4 + 0.2 + 0.5 + 1) / 4),
    }


def test_trace_file_is_valid_for_perfetto(tmp_path, clock):
    ranks = []
    for rank in range(2):
        timers = Timers()
        with timers.phase("actor", "update"):
            clock.sleep(1)
            with timers.phase("actor", "wait"):
                clock.sleep(0.5)
        timers.end_step(7)
        ranks.append(pickle.loads(pickle.dumps(timers.events())))  # as an object gather sends them
    path = tmp_path / "timeline.json"
    write_timeline(path, ranks)
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    assert trace["otherData"] == {"start_unix_ns": "51000"}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    rows = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert rows == {0: "rank 0", 1: "rank 1"}
    assert {event["ph"] for event in trace["traceEvents"]} == {"X", "M"}
    for event in spans:
        assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid"}
    assert [(event["name"], event["ts"], event["dur"], event["tid"]) for event in spans] == [
        ("step 7", 0.0, 1.5e6, 0), ("actor/update", 0.0, 1.5e6, 0), ("actor/wait", 1e6, 5e5, 0),
        ("step 7", 1.5e6, 1.5e6, 1), ("actor/update", 1.5e6, 1.5e6, 1), ("actor/wait", 2.5e6, 5e5, 1),
    ]  # fmt: skip


def test_trace_keeps_nanoseconds_of_today(tmp_path):
    start = 1_760_000_000_000_000_001
    events = [TraceEvent("step 1", "step", start, 10), TraceEvent("actor/update", "actor", start + 3, 7)]
    write_timeline(tmp_path / "timeline.json", [events, []])
    spans = [event for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] if "ts" in event]
    assert [(event["ts"], event["dur"]) for event in spans] == [(0.0, 0.01), (0.003, 0.007)]
