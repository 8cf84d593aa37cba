"""A run whose rollout is by guests is the run in which its own ranks generate, to the bit, whatever happens to them."""

import dataclasses
import os
import signal

import pytest

from megarl import generate
from tests.helpers import faults
from tests.helpers.pages.combinations import EXPERTS
from tests.helpers.processes import free_port
from tests.helpers.programs import in_world, metrics, program
from tests.helpers.rollout import guests
from tests.helpers.rollout.guests import ACCIDENTS, after_the_accident, mark_of
from tests.helpers.tiers import by_default
from tests.helpers.worlds import SAFETY_SECONDS, run_world
from tests.laws.features import FEATURES
from tests.laws.features.feature import PP2, TP2
from tests.laws.runs import argv, assert_same, run, whole

# Features that guests can generate: with one replica in the run, and with two, with tensor parallelism, and ahead.
ALIKE = (
    "ppo", "greedy baselines", "dynamic sampling", "waiting groups", "over-sampling", "partial rollouts", "thoughts",
    "average of factors", "factors", "factors in bf16", "turns", "carried turns", "lag, turns", "thoughts in turns",
    "shared turns over rounds, late", "branching agent", "an agent's turns", "lag", "lag, replicas", "lag, factors",
    "lag, partial rollouts",
)  # fmt: skip


def with_guests(feature, save, *prepared, more="", awaited=None, ranks=0, of_guest=1):
    """A feature's run with guests of so many ranks; the exit statuses of those that have ended."""
    port, ranks = free_port(), ranks or feature.ranks
    flags = argv(feature, save, f"--replica-port {port} --replica-timeout 1 {more}")
    with guests.guests(flags, port, save, *prepared, ranks=of_guest, awaited=awaited) as processes:
        run_world(in_world, ranks, "rl", program("rl", flags, ranks))
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
    assert with_guests(feature, tmp_path / "run", None) == [0]
    found = events(tmp_path / "run")
    assert found["joined"] == 1 and found["duplicates_differ"] == 0
    assert_same(tmp_path / "run", whole(name), range(1, feature.steps + 1))


LAYOUTS = [  # ranks of the run, of a guest, flags
    (2, 2, TP2[1]), (2, 2, PP2[1]), (1, 1, f"{EXPERTS} --router-replay old-logprob"),
    (3, 2, "--role-map actor=0;critic=0;reward=0;reference=0;rollout=1-2 --rollout-tensor-model-parallel-size 2"),
]  # fmt: skip


@pytest.mark.parametrize("ranks, of_guest, flags", by_default(LAYOUTS, LAYOUTS[:1]))
def test_guests_have_the_layout_of_a_replica(ranks, of_guest, flags, tmp_path):
    feature = dataclasses.replace(FEATURES["ppo"], warm_start=EXPERTS not in flags)
    alone = run(feature, tmp_path / "alone", flags, ranks)
    with_guests(feature, tmp_path / "run", None, more=flags, ranks=ranks, of_guest=of_guest)
    found = events(tmp_path / "run")
    assert found["joined"] == 1 and found["duplicates_differ"] == 0
    assert_same(tmp_path / "run", alone, range(1, feature.steps + 1), but="weights/")


def test_a_run_that_starts_again_finds_its_guests_with_their_weights(tmp_path):
    """The run is killed in its second update; a guest takes the weights of each step once."""
    save, port, feature = tmp_path / "run", free_port(), FEATURES["ppo"]
    flags = argv(feature, save, f"--replica-port {port} --replica-timeout 1 --keep-responses false")
    taken, killed = save.with_name("taken"), save.with_name("killed")

    def noted(_):
        take = generate.Guest._take_weights

        def takes(guest):
            take(guest)
            taken.write_text((taken.read_text() if taken.exists() else "") + f"{guest.number} {guest.weights}\n")

        generate.Guest._take_weights = takes

    def kill():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def prepare():
        if faults.attempt() == 0:
            faults.in_phase(("actor", "update"), 2, kill)

    with guests.guests(flags, port, save, noted) as (process,):
        assert faults.run(flags, 1, prepare, restarts=1) == 0 and killed.exists()
        process.join(SAFETY_SECONDS)
        assert process.exitcode == 0
    rows = [line.split() for line in taken.read_text().splitlines()]
    assert len({weights for _, weights in rows}) == len(rows) == feature.steps
    assert_same(save, whole("ppo"), range(1, feature.steps + 1))


PLACES = [("ppo", accident, joins) for accident in ACCIDENTS for joins in (False, True)]
BY_DEFAULT = [("ppo", "killed", True), ("ppo", "late", False), ("ppo", "leaves", True)]
PLACES += [
    (name, accident, True)
    for name in ("turns", "branching agent", "partial rollouts", "factors in bf16", "lag")
    for accident in ("killed", "leaves")
]


@pytest.mark.parametrize("name, accident, joins", by_default(PLACES, BY_DEFAULT))
def test_an_accident_of_a_guest_changes_nothing(name, accident, joins, tmp_path):
    """The other guest was there before, or joins after the accident."""
    feature, save, expected = FEATURES[name], tmp_path / "run", whole(name)
    other = None if joins else after_the_accident
    awaited = mark_of(save) if joins else None
    statuses = with_guests(feature, save, ACCIDENTS[accident], other, awaited=awaited)
    assert mark_of(save).exists() and (statuses[0] == 0 if accident == "leaves" else True)
    found = events(save)
    assert found["joined"] == 2 and found["duplicates_differ"] == 0
    assert found["reissued"] >= 1 or accident == "killed with weights"
    assert_same(save, expected, range(1, feature.steps + 1))
