"""The limit on verifier failures: a share of the latest samples, whatever the size of the calls."""

import random

from megarl.roles.reward_metrics import MIN_FAILURES, WINDOW, FailureWindow


def calls(window, *sizes_and_failures):
    """Whether each call ends the run."""
    ends = []
    for count, failed in sizes_and_failures:
        window.add(count, {"v": failed, "other": 0})
        ends.append(window.exceeded("v"))
        assert not window.exceeded("other")
    return ends


def test_small_calls_do_not_end_a_run():
    """A verifier that fails on 4 %, a limit of 10 %, groups of 4 samples: one failure is 25 % of its call."""
    draw, window = random.Random(0), FailureWindow(0.1)
    assert not any(calls(window, *[(4, sum(draw.random() < 0.04 for _ in range(4))) for _ in range(5000)]))


def test_a_share_above_the_limit_ends_it_once_there_are_enough():
    assert calls(FailureWindow(0.1), *[(10, 9)] * 6) == [False] * 5 + [True]
    assert calls(FailureWindow(0.1), (MIN_FAILURES, MIN_FAILURES - 1)) == [False]
    assert calls(FailureWindow(0.1), (8 * WINDOW, 800), (1, 1)) == [False, True]
    assert calls(FailureWindow(1.0), *[(10, 10)] * 200) == [False] * 200


def test_a_verifier_that_scores_nothing_at_all_ends_it_soon():
    assert calls(FailureWindow(0.1), *[(4, 4)] * 2) == [False, True]
    assert calls(FailureWindow(0.1), (1, 0), *[(4, 4)] * 3) == [False] * 4


def test_without_an_allowance_the_first_failure_ends_it():
    assert calls(FailureWindow(0.0), (1000, 0), (1000, 1)) == [False, True]


def test_old_calls_leave_the_window():
    window = FailureWindow(0.1)
    assert calls(window, (500, 49), *[(100, 0)] * 9) == [False] * 10
    assert window.samples == 1400 and window.failed["v"] == 49
    assert calls(window, (100, 0)) == [False]
    assert window.samples == 1000 and window.failed["v"] == 0
    assert calls(window, *[(10, 2)] * 60)[-1]
