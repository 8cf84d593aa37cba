"""tools/chaos.py: planned kills, the table; long: kills of a run, whose results stay the same."""

import json

import pytest

from tools import chaos


def test_kills_are_drawn_from_the_seed_and_reach_every_phase_change_each_phase_equally_often():
    changes = [["actor/rollout"] * 2 + ["actor/exchange"] * 6 + ["actor/save"] * 2, ["critic/update"] * 4]
    kills = chaos.plan(1, 4000, changes)
    assert kills == chaos.plan(1, 4000, changes) != chaos.plan(2, 4000, changes)
    assert {(k.rank, k.change) for k in kills} == {(0, n) for n in range(11)} | {(1, n) for n in range(5)}
    of_actor = [k.change for k in kills if k.rank == 0]
    for numbers in ({0}, {1, 2}, set(range(3, 9)), {9, 10}):  # the start, then the three phases
        assert sum(n in numbers for n in of_actor) == pytest.approx(len(of_actor) / 4, rel=0.15)
    assert all(0 <= k.delay <= (max(chaos.DELAYS) if k.change else chaos.START_DELAY) for k in kills)


def test_the_table_counts_phases_and_ranks():
    done = [{"rank": 1, "phase": "actor/save"}, {"rank": 1, "phase": "set-up"}, {"rank": 3, "phase": "actor/save"}]
    assert chaos.table(done).splitlines() == [
        "| phase | kills |", "|---|---|", "| actor/save | 2 |", "| set-up | 1 |", "| all | 3 |", "",
        "ranks: 0: 0, 1: 2, 2: 0, 3: 1",
    ]  # fmt: skip


def test_a_run_that_differs_or_ends_early_is_a_failure(tmp_path, monkeypatch, capsys):
    """Both runs are replaced: the first writes its phase changes, the second a kill and other metrics."""

    def run(argv, prepare, restarts=0):
        save = tmp_path / argv[argv.index("--save") + 1].rsplit("/", 1)[1]
        save.mkdir()
        (save / "metrics.jsonl").write_text(json.dumps({"step": 1, "a": restarts, "time/x_s": restarts}) + "\n")
        for rank in range(chaos.RANKS):
            (tmp_path / f"changes-{rank}").write_text(json.dumps(["actor/save"] * 40))
        if restarts:
            (tmp_path / "kills.jsonl").write_text(json.dumps({"rank": 0, "phase": "actor/save"}) + "\n")
        return 0

    monkeypatch.setattr(chaos, "run", run)
    assert chaos.main(["--out", str(tmp_path), "--kills", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["1 of 2 kills before the run ended: give more --steps", "run: metrics: step 1"]


AHEAD = ["--role-map", "actor=0-1;critic=2;reward=3;reference=3;rollout=3", "--rollout-correction", "tis"]

JUDGED_AHEAD = [*AHEAD[2:], "--generation-lag", "1", "--role-map",
                "actor=0;critic=1;reference=1;rollout=2;reward=3"]  # fmt: skip

CARRIED = (
    "--environment tests.helpers.envs.sum_environments:LateSums --max-turns 3 --max-turn-length 12"
    " --max-response-length 48 --max-tokens-per-microbatch 200 --over-sampling 2 --partial-rollouts --generation-lag 1"
).split()

IN_MEMORY = ["--save-memory", "--save-interval", "20"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "flags",
    [[], [*AHEAD, "--generation-lag", "2"], [*AHEAD, *CARRIED], IN_MEMORY],
    ids=["in step", "ahead", "carried episodes", "in memory"],
)
def test_fifty_kills_change_nothing(flags, tmp_path, capfd):
    """pytest -m nightly tests/tools/test_chaos.py"""
    assert chaos.main(["--out", str(tmp_path), "--kills", "50", "--", *flags]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("no difference")


@pytest.mark.long
@pytest.mark.parametrize("mode, flags", [("single", []), ("pair", JUDGED_AHEAD)])
def test_kills_of_a_run_with_a_judge_change_nothing(mode, flags, tmp_path, capfd):
    """It tries again where it writes no number, and reads responses while others are generated."""
    assert chaos.main(["--out", str(tmp_path), "--judge", mode, "--kills", "5", "--seed", "4", "--", *flags]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("no difference")
    (row, *_) = map(json.loads, (tmp_path / "disturbed/samples/step_00000005.jsonl").read_text().splitlines())
    assert len(row["judgements"]) >= 2
