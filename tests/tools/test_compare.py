"""tools/compare.py: where runs part, what is beside the point, what it prints."""

import json

import pytest

from tools import compare


def write_run(folder, change=None, **settings):
    """A run of four steps with samples; `change(step, row)` edits each row before it is written."""
    (folder / "samples").mkdir(parents=True)
    lines = []
    for step in range(1, 5):
        row = {"step": step, "reward/mean": step / 3, "actor/grad_norm": 1.5, "time/step_s": 0.25, "memory/actor/x": 7}
        row["rollout/tokens_per_s"] = 100.0
        if change:
            change(step, row)
        lines.append(json.dumps(row) + "\n")
        (folder / "samples" / f"step_{step:08d}.jsonl").write_text(json.dumps({"response": str(step)}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    megarl = {"seed": 1, "save": str(folder), **settings}
    (folder / "settings.yaml").write_text(json.dumps({"megarl": megarl, "roles": {"actor": {"ranks": "0-1"}}}))
    return folder


def run(capsys, *argv) -> tuple[int, str]:
    status = compare.main(list(map(str, argv)))
    printed = capsys.readouterr()
    assert status != 2, printed.err
    return status, printed.out


def last_bit(step, row):
    if step >= 3:
        row["actor/grad_norm"] = 1.5000000000000002


def clock(step, row):
    row |= {"time/step_s": 9.0, "memory/actor/x": 1, "rollout/tokens_per_s": 1.0}


def test_equal_runs_are_exact_whatever_their_clock_and_settings_say(tmp_path, capsys):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", clock, kl_coefficient=0.1)
    status, out = run(capsys, one, two, "--exact")
    assert status == 0
    lines = out.splitlines()
    assert lines[-1] == "A and B: metrics of all 4 common steps are equal; all 4 samples files are equal"
    start = lines.index("settings that differ: 1")
    assert lines[start + 2].split() == ["megarl.kl_coefficient", "-", "0.1"]


def test_the_first_bit_that_differs_is_named_with_its_step(tmp_path, capsys):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", last_bit)
    three = write_run(tmp_path / "three", lambda step, row: row.update({"reward/mean": -0.0, "extra": 1}))
    (two / "samples" / "step_00000004.jsonl").write_text("{}\n")
    (three / "samples" / "step_00000001.jsonl").unlink()
    status, out = run(capsys, one, two, three)
    assert status == 0  # only --exact makes a difference a failure
    assert out.splitlines()[-2:] == [
        "A and B: equal up to step 2, first difference at step 3: actor/grad_norm; "
        "3 of 4 samples files are equal, the first other is step_00000004.jsonl",
        "A and C: differ from the first common step, first difference at step 1: extra and 1 more; "
        "all 3 samples files are equal, 1 files are in one of them only",
    ]
    assert run(capsys, one, two, "--exact")[0] == 1 and run(capsys, one, one, "--exact")[0] == 0


@pytest.mark.parametrize("damage", ["a step less", "a samples file less", "another text", "a zero with a sign"])
def test_exact_misses_no_difference(tmp_path, capsys, damage):
    one = write_run(tmp_path / "one", lambda step, row: row.update({"actor/loss": 0.0}))
    two = write_run(tmp_path / "two", lambda step, row: row.update({"actor/loss": 0.0}))
    metrics, samples = two / "metrics.jsonl", two / "samples" / "step_00000002.jsonl"
    assert run(capsys, one, two, "--exact")[0] == 0
    if damage == "a step less":
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    elif damage == "a zero with a sign":
        metrics.write_text(metrics.read_text().replace('"actor/loss": 0.0', '"actor/loss": -0.0', 1))
    elif damage == "another text":
        samples.write_text('{"response": "3"}\n')
    else:
        samples.unlink()
    assert run(capsys, one, two, "--exact")[0] == 1


def test_numbers_of_the_table_and_of_json(tmp_path, capsys):
    def evaluated(step, row):
        if step == 2:
            row |= {"eval/accuracy": 0.5, "reward/mean": None}  # null: it was not finite

    one, two = write_run(tmp_path / "one", evaluated), write_run(tmp_path / "two", last_bit)
    _, out = run(capsys, one, two, "--json", "--last", "2", "--metrics", "eval/*", "reward/mean", "actor/grad_norm")
    found = json.loads(out)
    none = {"first": None, "last": None, "best": None, "best_step": None, "mean": None}
    assert found["metrics"] == {
        "actor/grad_norm": [
            {"first": 1.5, "last": 1.5, "best": None, "best_step": None, "mean": 1.5},
            {"first": 1.5, "last": 1.5000000000000002, "best": None, "best_step": None, "mean": 1.5000000000000002},
        ],
        "eval/accuracy": [{"first": 0.5, "last": 0.5, "best": 0.5, "best_step": 2, "mean": 0.5}, none],
        "reward/mean": [
            {"first": 1 / 3, "last": 4 / 3, "best": 4 / 3, "best_step": 4, "mean": (1.0 + 4 / 3) / 2},
            {"first": 1 / 3, "last": 4 / 3, "best": 4 / 3, "best_step": 4, "mean": (1.0 + 4 / 3) / 2},
        ],
    }
    assert found["differences"] == [
        {"equal_steps": 1, "equal_up_to": 1, "step": 2, "metrics": ["eval/accuracy", "reward/mean"], "missing": 0}
    ]
    assert found["exact"] is False and found["settings"] == {}


def test_names_from_files_cannot_reach_the_terminal(tmp_path, capsys):
    evil = "actor/\x1b[2J\u202eloss"
    one = write_run(tmp_path / "one", lambda step, row: row.update({evil: 1.0}), reward="\x1b]0;title\x07")
    two = write_run(tmp_path / "two")
    _, out = run(capsys, one, two, "--metrics", "actor/*")
    assert out.isascii() and all(line.isprintable() for line in out.splitlines())
    assert r"actor/\x1b[2J\u202eloss" in out and r"\x1b]0;title\x07" in out


WRONG = {
    "one run": (["ONE"], "one run has nothing to be compared with"),
    "no folder": (["ONE", "nowhere"], "nowhere: no such folder"),
    "no metrics": (["ONE", "EMPTY"], "no metrics file"),
    "no steps": (["ONE", "ONE", "--last", "0"], "--last 0: must be at least 1"),
    "no such metric": (["ONE", "ONE", "--metrics", "loss"], "--metrics loss: no metric of these runs"),
    "damaged settings": (["ONE", "BROKEN"], "cannot be read"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gives_one_line(tmp_path, refusal, case):
    argv, expected = WRONG[case]
    places = {"ONE": write_run(tmp_path / "one"), "EMPTY": tmp_path, "BROKEN": write_run(tmp_path / "broken")}
    (tmp_path / "broken" / "settings.yaml").write_text("a: [b\n")
    assert expected in refusal(compare.main, [str(places.get(word, word)) for word in argv])
