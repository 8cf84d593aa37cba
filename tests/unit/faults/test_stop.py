"""Signals: which step is the last, the second signal, the grace period, and forked processes."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch.distributed as dist

from megarl.faults import heartbeat, stop
from megarl.faults.stop import KEPT, RunStop, begins, refuse_next_step
from megarl.rewards import guard
from tests.helpers.faults import sleep_for_ever
from tests.helpers.programs import environment
from tests.helpers.worlds import SAFETY_SECONDS, RankFailed, run_world, wait_until

# -- agreement ---------------------------------------------------------------------------------------------------


def test_the_run_stops_before_a_step_that_nobody_has_begun():
    store = dist.HashStore()
    slow, fast = 0, 1
    assert begins(store, slow, 1) and all(begins(store, fast, step) for step in (1, 2, 3))
    assert refuse_next_step(store, 1) == (4, True)  # the slow rank has the signal
    assert refuse_next_step(store, 3) == (4, False)
    assert all(begins(store, slow, step) for step in (2, 3))
    assert not begins(store, fast, 4) and not begins(store, slow, 4)


def test_a_signal_before_the_first_step_lets_none_begin():
    store = dist.HashStore()
    assert refuse_next_step(store, 0) == (1, True)
    assert not begins(store, 0, 1)


def test_entries_of_earlier_steps_are_deleted():
    store = dist.HashStore()
    for step in range(1, 3 * KEPT):
        assert all(begins(store, rank, step) for rank in range(2))
    assert store.num_keys() == KEPT


def run_until_stopped(rank: int, signalled: list[int]) -> int:
    """Ranks that get up to seven steps apart; those in `signalled` get a signal, in different steps."""
    done = 100  # the steps before are those of a run that it continues
    run_stop = RunStop(rank, SAFETY_SECONDS, done)
    run_stop.install()
    while run_stop.may_begin(done + 1):
        if rank in signalled and done == 103 + rank:
            os.kill(os.getpid(), signal.SIGTERM)
        done += 1
        if done % 7 == 0:
            dist.barrier()
    dist.barrier()
    return done


@pytest.mark.parametrize("signalled", [[0], [1], [0, 1]])
def test_all_ranks_end_with_the_same_step(signalled):
    first, second = run_world(run_until_stopped, 2, signalled)
    assert first == second > 103


# -- the process -------------------------------------------------------------------------------------------------


def handler(grace: float) -> RunStop:
    signals = RunStop(0, grace, 7, dist.HashStore())
    signals.install()
    return signals


def alarmed(rank: int) -> list[int | None]:
    """What has been received after two alarms of a slow verifier, and after a signal."""
    signals = handler(SAFETY_SECONDS)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            guard.call(lambda _: sleep_for_ever(), None, 0.01)
    before = signals.received
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_until(lambda: signals.received is not None)
    return [before, signals.received]


def test_the_alarm_of_a_verifier_that_takes_too_long_stops_no_run():
    assert run_world(alarmed, 1) == [[None, signal.SIGTERM]]


def signalled_twice(rank: int):
    stop.SAME_SIGNAL = 0.0
    signals = handler(SAFETY_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_until(lambda: signals.received == signal.SIGTERM)
    while True:
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_signal_ends_the_process_at_once(capfd):
    with pytest.raises(RankFailed, match=f"ended with exit code {128 + signal.SIGINT}"):
        run_world(signalled_twice, 1)
    assert capfd.readouterr().err == ("megarl: SIGTERM: stopping before step 8; a second signal ends the run at once\n")


def signalled_in_a_long_step(rank: int):
    handler(0.01)
    os.kill(os.getpid(), signal.SIGUSR1)
    threading.Event().wait()


def test_a_step_that_does_not_end_in_the_grace_period_is_dropped(capfd):
    with pytest.raises(RankFailed, match=f"ended with exit code {128 + signal.SIGUSR1}"):
        run_world(signalled_in_a_long_step, 1)
    line = capfd.readouterr().err.splitlines()[-1]
    assert line == "megarl: step 7 did not end within --exit-grace 0.01 s: dropped, nothing is saved"


def ended_by_a_launcher(rank: int):
    dist.distributed_c10d._get_default_store = lambda: store
    store = dist.HashStore()
    heartbeat.report_failure()
    RunStop(0, SAFETY_SECONDS, 7, store).install()
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()


def test_a_signal_after_another_rank_has_failed_ends_the_process_at_once(capfd):
    """torchrun ends the other ranks with SIGTERM: there is no step to finish without the failed one."""
    with pytest.raises(RankFailed, match="ended with exit code 1"):
        run_world(ended_by_a_launcher, 1)
    assert capfd.readouterr().err == ""


def signalled_while_it_saves(rank: int) -> int:
    signals = handler(0.01)
    refuse_next_step(signals.store, 7)
    assert not signals.may_begin(8)
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_until(lambda: signals.received)
    return signals.received


def test_saving_has_no_limit():
    assert run_world(signalled_while_it_saves, 1) == [signal.SIGTERM]


def forked_dispositions(rank: int) -> tuple[list, int | None]:
    signals = handler(SAFETY_SECONDS)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        expected = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.SIG_IGN, signal.SIGUSR1: signal.SIG_IGN}
        os.write(writer, bytes(signal.getsignal(number) == handler for number, handler in expected.items()))
        signal.pause()
    answer = list(os.read(reader, 3))
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    status = os.waitpid(pid, 0)[1]
    return answer + [os.WTERMSIG(status)], signals.received


def test_a_forked_process_is_ended_by_its_parent_alone():
    """Its SIGTERM neither reaches the parent's pipe nor stops the run."""
    assert run_world(forked_dispositions, 1) == [([1, 1, 1, signal.SIGTERM], None)]


BLOCKED = """import os, signal, sys, time
from megarl.faults import stop
import torch.distributed as dist
stop.RunStop(0, 0.01, 0, dist.HashStore()).install()
os.kill(os.getpid(), signal.SIGTERM)
dist.HashStore().wait(["never"])  # native code: Python's handlers do not run
"""


def test_a_signal_is_seen_while_the_main_thread_is_in_native_code():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], env=environment(), capture_output=True, text=True, timeout=SAFETY_SECONDS
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
