"""Who counts as hung, from heartbeats and a clock given as numbers, and what is printed of each rank."""

import sys

import pytest
import torch
import torch.distributed as dist

from megarl.faults.hang_report import MAX_ROWS, Watch, is_in_collective, where
from megarl.observe import activity
from tests.helpers.waiting import wait_until
from tests.helpers.worlds import run_world

LIMIT = 600.0
WAITS = "all_reduce at megarl/comm/exchange.py:57"
WORKS = "at megarl/roles/critic.py:50, update"


def state(beat, progress, phase="actor/update", where=WAITS, **more) -> dict:
    role, name = phase.split("/") if phase else (None, None)
    values = {"beat": beat, "progress": progress, "role": role, "phase": name, "where": where, "step": 3}
    return values | {"seconds": 1.5, "collectives": 41, "done": False, "verdict": None} | more


def watch(history: list[tuple[float, dict[int, dict]]]) -> Watch:
    """A watch after these (time, states by rank)."""
    result = Watch(LIMIT, 0.0)
    for now, states in history:
        result.update(states, now)
    return result


def test_waiting_for_a_role_that_works_for_three_times_the_limit_is_no_hang():
    seen = Watch(LIMIT, 0.0)
    for i in range(91):
        seen.update({0: state(i, 7, "actor/exchange"), 1: state(i, i, "critic/update", WORKS)}, 20.0 * i)
        assert seen.problem(range(2)) is None
    assert seen._seconds(0) == 1800.0


def test_ranks_that_wait_outside_of_computation_are_not_blamed_for_the_time():
    phases = ["actor/exchange", "actor/wait", "rollout/sync", "actor/save", None]
    history = [(20.0 * i, {r: state(i, 7, phase) for r, phase in enumerate(phases)} | {5: state(i, i, "critic/update")})
               for i in range(91)]  # fmt: skip
    assert watch(history).problem(range(6)) is None


def test_a_role_without_progress_is_found_while_another_works():
    ranks = {0: state(0, 7, "rollout/rollout"), 1: state(0, 1), 2: state(0, 1, where=WORKS)}
    history = [(0.0, ranks)]
    for i in range(1, 31):
        ranks = {rank: s | {"beat": i} for rank, s in ranks.items()} | {0: state(i, i + 7, "rollout/rollout")}
        history.append((20.0 * i, ranks))
    assert watch(history[:-1]).problem(range(3)) is None
    found = watch(history).problem(range(3))
    assert found == ("no rank in actor/update has made progress for 600 s; not in a collective: rank 2 (actor/update)")


def regular(silence: float, steps: int) -> Watch:
    """A watch of two ranks that have ended rollouts in so many steps after such silences; another begins at 0 s."""
    history, now = [], -2 * steps * silence
    for number in range(2 * steps + 1):
        phase, step = "actor/exchange" if number % 2 else "rollout/rollout", number // 2
        history.append((now + number * silence, {rank: state(number, number, phase, step=step) for rank in range(2)}))
    seen = Watch(LIMIT, now)
    for when, states in history:
        seen.update(states, when)
    return seen


@pytest.mark.parametrize("silence, steps, limit", [(0.5, 2, 50.0), (4.0, 2, 80.0), (40.0, 2, LIMIT), (0.5, 1, LIMIT)])
def test_a_regular_phase_ends_long_before_the_limit_once_it_is_known(silence, steps, limit):
    seen, ranks = regular(silence, steps), range(2)
    for when in (limit / 2 - 0.1, limit / 2, limit - 0.1):
        seen.update({rank: state(100 + when, 2 * steps, "rollout/rollout") for rank in ranks}, when)
        warnings, is_short = seen.warnings(ranks), limit < LIMIT
        assert warnings == [
            f"no rank in rollout/rollout has made progress for {when:.0f} s; the run ends if none does within "
            f"{limit:.0f} s"
        ] * (is_short and when == limit / 2)
        assert seen.problem(ranks) is None
    seen.update({rank: state(limit, 2 * steps, "rollout/rollout") for rank in ranks}, limit)
    usual = f"rollout/rollout has made progress for {limit:.0f} s (the longest silence there was {silence:.1f} s)"
    whole = f"no rank has made progress for {limit:.0f} s"
    assert seen.problem(ranks) == (f"no rank in {usual}" if is_short else whole)


def test_the_time_of_a_job_that_is_suspended_counts_for_nobody():
    seen = watch([(0.0, {0: state(1, 1), 1: state(1, 1)}), (20.0, {0: state(2, 2), 1: state(2, 2)})])
    seen.skip(3600.0)
    seen.update({0: state(3, 3), 1: state(2, 2)}, 3640.0)  # rank 1 has not sent its heartbeat yet
    assert seen.problem(range(2)) is None and seen.table([1])[-1].split()[3] == "20"


def test_one_rank_that_works_keeps_its_role_alive():
    history = [(20.0 * i, {0: state(i, 1), 1: state(i, i)}) for i in range(91)]
    assert watch(history).problem(range(2)) is None


def test_a_world_without_progress_is_found():
    history = [(t, {0: state(t, 5, None), 1: state(t, 5, "critic/exchange", WORKS)}) for t in (0.0, 300.0, 599.0)]
    assert watch(history).problem(range(2)) is None
    found = watch([*history, (600.0, {0: state(9, 5, None), 1: state(9, 5, "critic/exchange", WORKS)})])
    assert found.problem(range(2)) == (
        "no rank has made progress for 600 s; not in a collective: rank 1 (critic/exchange)"
    )


def test_a_rank_without_heartbeat_is_found_and_one_that_ended_is_not():
    alive = [(20.0 * i, {0: state(i, i), 1: state(1, 1), 2: state(1, 1, done=True)}) for i in range(31)]
    assert watch(alive[:-1]).problem(range(3)) is None
    found = watch(alive).problem(range(3))
    assert found.startswith("rank 1 (actor/update) has sent no heartbeat for 600 s: its process is gone, stopped, or ")
    assert watch(alive).silence(1, patience=60.0) is None
    never = watch([(20.0 * i, {0: state(i, i)}) for i in range(31)])
    assert never.problem(range(2)).startswith("rank 1 (set-up) has sent no heartbeat for 600 s")


def test_the_table_names_every_rank():
    seen = watch([(0.0, {0: state(1, 1), 1: state(1, 1, None, WORKS, step=0)}), (700.0, {0: state(2, 1)})])
    assert seen.table(range(3)) == [
        "  rank  role/phase    step  seconds  collectives  position",
        "  0     actor/update  3     700      41           all_reduce at megarl/comm/exchange.py:57",
        "  1     set-up        0     700      41           at megarl/roles/critic.py:50, update",
        "  2     set-up        -     700      -            never heard of",
    ]


def test_a_long_table_starts_with_ranks_outside_of_collectives():
    states = {rank: state(1, 1, where=WORKS if rank == 999 else WAITS) for rank in range(1000)}
    lines = watch([(0.0, states)]).table(range(1000))
    assert len(lines) == MAX_ROWS + 2 and lines[-2].split()[0] == "999" and lines[-3].split()[0] == str(MAX_ROWS - 2)
    assert lines[-1] == f"  … and {1000 - MAX_ROWS} more ranks"


def test_positions_name_the_collective_and_the_caller():
    def stacks(rank):
        import threading

        found, ready, main = [], threading.Event(), threading.get_ident()

        def is_waiting():
            found.append(where(sys._current_frames()[main]))
            return is_in_collective({"where": found[-1]})

        def look():
            assert wait_until(is_waiting)  # rank 1 waits until this rank has seen it
            ready.set()
            dist.distributed_c10d._get_default_store().set("seen", "1")

        if rank == 0:
            threading.Thread(target=look).start()
        else:
            dist.distributed_c10d._get_default_store().get("seen")
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            ready.wait()
        return found[-1:]

    (position,), _ = run_world(stacks, 2)
    name, file = position.split(":")[0].split(" at ")
    assert (name, file) == ("all_reduce", "unit/faults/test_hang_report.py")
    here = where(sys._getframe())
    assert here.startswith("at unit/faults/test_hang_report.py:")
    assert here.endswith(", test_positions_name_the_collective_and_the_caller")
    assert not is_in_collective({"where": here})


def test_what_waits_with_a_limit_of_its_own_makes_progress():
    before = activity.ticks()
    assert activity.ticks() == before
    activity.tick()
    assert activity.ticks() == before + 1
    with activity.limited(), activity.limited():
        assert activity.ticks() < activity.ticks()
    before = activity.ticks()
    assert activity.ticks() == before
    with pytest.raises(KeyError), activity.limited():
        raise KeyError
    before = activity.ticks()
    assert activity.ticks() == before


def test_rows_of_the_status_file_have_the_time_since_the_last_heartbeat():
    done = state(1, 9, None, done=True)
    seen = watch([(10.0, {0: state(1, 7), 1: done}), (30.0, {0: state(2, 7)}), (34.0, {0: state(2, 7)})])
    assert seen.rows(range(3)) == [["actor", "update", 3, 5.5, 24.0, False], [None, None, 3, 25.5, 24.0, True], []]
