"""A run whose rollout is by guests is the run in which its own ranks generate, to the bit, whatever happens to them."""

import pytest

from tests.helpers.processes import free_port
from tests.helpers.programs import in_world, metrics, program
from tests.helpers.rollout import guests
from tests.helpers.rollout.guests import ACCIDENTS, after_the_accident, mark_of
from tests.helpers.tiers import by_default
from tests.helpers.worlds import SAFETY_SECONDS, run_world
from tests.laws.features import FEATURES
from tests.laws.runs import argv, assert_same, whole

# Features that guests can generate: with one replica in the run, and with two, with tensor parallelism, and ahead.
ALIKE = (
    "ppo", "greedy baselines", "dynamic sampling", "waiting groups", "over-sampling", "partial rollouts", "thoughts",
    "average of factors", "factors", "factors in bf16", "lag", "lag, replicas", "lag, factors", "lag, partial rollouts",
)  # fmt: skip


def with_guests(name, save, *prepared, more="", awaited=None):
    """A feature's run with guests; the exit statuses of those that have ended."""
    feature, port = FEATURES[name], free_port()
    flags = argv(feature, save, f"--replica-port {port} --replica-timeout 1 {more}")
    with guests.guests(flags, port, save, *prepared, awaited=awaited) as processes:
        run_world(in_world, feature.ranks, "rl", program("rl", flags, feature.ranks))
        if None in prepared:
            processes[prepared.index(None)].join(SAFETY_SECONDS)
        return [process.exitcode for process in processes]


def events(save) -> dict[str, float]:
    """What happened to guests in all steps."""
    names = ("joined", "reissued", "lost_tokens", "duplicates_differ")
    rows = [row for step, row in metrics(save).items() if step]
    return {name: sum(row[f"rollout/{name}"] for row in rows) for name in names}


@pytest.mark.parametrize("name", by_default(ALIKE, ["ppo"]))
def test_a_guest_generates_what_the_runs_own_ranks_do(name, tmp_path):
    feature = FEATURES[name]
    assert with_guests(name, tmp_path / "run", None) == [0]
    found = events(tmp_path / "run")
    assert found["joined"] == 1 and found["duplicates_differ"] == 0
    assert_same(tmp_path / "run", whole(name), range(1, feature.steps + 1))


PLACES = [("ppo", accident, joins) for accident in ACCIDENTS for joins in (False, True)]


@pytest.mark.parametrize("name, accident, joins", by_default(PLACES, [("ppo", "killed", True), ("ppo", "late", False)]))
def test_an_accident_of_a_guest_changes_nothing(name, accident, joins, tmp_path):
    """The other guest was there before, or joins after the accident."""
    feature, save = FEATURES[name], tmp_path / "run"
    other = None if joins else after_the_accident
    statuses = with_guests(
        name, save, ACCIDENTS[accident], other, more="" if joins else "--min-replicas 2",
        awaited=mark_of(save) if joins else None,
    )  # fmt: skip
    assert mark_of(save).exists() and (statuses[0] == 0 if accident == "leaves" else True)
    found = events(save)
    assert found["joined"] == 2 and found["duplicates_differ"] == 0
    assert found["reissued"] >= 1 or accident == "killed with weights"
    assert_same(save, whole(name), range(1, feature.steps + 1))
