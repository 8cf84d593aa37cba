"""All comparisons in one table: the best setting of each side, sides that fail, worker processes, wrong flags."""

import contextlib
import json
import sys

import pytest

from tools.bench import all as bench
from tools.bench import comparisons, rollout
from tools.bench.comparisons import Comparison, Side
from tools.bench.workers import Failed, Setting, Workers, command

ONE, TWO = Setting(1, 2), Setting(2, 1)


def known_side(seconds: dict[Setting, list[float]], opened: list) -> Side:
    """A side whose calls take known seconds, in turn; every open is noted, and whether it was closed."""

    @contextlib.contextmanager
    def open(setting, trial):
        opened.append((setting, trial))
        yield lambda: seconds[setting].pop(0)
        opened.append("closed")

    return Side(open)


def test_each_side_runs_its_best_setting(capsys):
    opened = {"megarl": [], "peer": []}
    ours = known_side({ONE: [2.0, 1.0, 3.0, 2.5], TWO: [4.0]}, opened["megarl"])
    theirs = known_side({ONE: [9.0], TWO: [5.0, 5.0, 6.0, 4.0]}, opened["peer"])
    results = bench.compare(Comparison("work", {"megarl": ours, "peer": theirs}), [ONE, TWO], 3)
    trials = [(ONE, True), "closed", (TWO, True), "closed"]
    assert opened == {"megarl": [*trials, (ONE, False), "closed"], "peer": [*trials, (TWO, False), "closed"]}
    assert bench.rows("work", results) == [
        ["work", "megarl", "1 × 2", "2.50 s", "", "2 × 1: 4.00 s"],
        ["work", "peer", "2 × 1", "5.00 s", "2.00", "1 × 2: 9.00 s"],
    ]
    rounds = [line.split()[2].rstrip(":") for line in capsys.readouterr().out.splitlines() if "round" in line]
    assert rounds == ["megarl", "peer", "peer", "megarl", "megarl", "peer"]


def test_a_side_that_fails_is_a_row():
    def never(setting, trial):
        raise Failed(f"no room for {setting}")

    ours = known_side({ONE: [1.0], TWO: []}, [])  # the second setting has no seconds: an IndexError
    late = known_side({ONE: [1.0], TWO: [0.5]}, [])  # fails in the first round
    ours_seconds = known_side({ONE: [2.0, 2.0, 2.0], TWO: []}, [])
    assert bench.try_settings("ours", ours, [ONE, TWO]).setting == ONE
    sides = {"megarl": ours_seconds, "peer": Side(never), "late": late}
    results = bench.compare(Comparison("work", sides), [ONE, TWO], 2)
    assert bench.rows("work", results) == [
        ["work", "megarl", "1 × 2", "2.00 s", "", ""],
        ["work", "peer", "", "no room for 2 × 1", "", ""],
        ["work", "late", "2 × 1", "IndexError: pop from empty list", "", "1 × 2: 1.00 s"],
    ]


def test_the_table_names_machine_and_versions(tmp_path, monkeypatch, capsys):
    known = Comparison("known", {"megarl": known_side({ONE: [1.0]}, [])})

    def broken(folder, options):
        raise OSError("no data")

    monkeypatch.setattr(bench, "GROUPS", {"known": [lambda folder, options: known], "broken": [broken]})
    files = ["--out", str(tmp_path / "table.md"), "--json", str(tmp_path / "all.json")]
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    assert bench.main(["--settings", "1x2", "--rounds", "1", *files]) == 0
    text = (tmp_path / "table.md").read_text()
    assert text.startswith("Processor: ") and " cores, " in text and "torch 2." in text and "megatron-core 0.19" in text
    assert "| known | megarl | 1 × 2 | 1.00 s |  |  |\n| broken | megarl |  | OSError: no data |" in text
    assert text in capsys.readouterr().out
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["works"][0]["sides"]["megarl"]["seconds"] == [1.0] and found["processor"]["name"]


def test_workers_take_a_share_each_and_answer_together(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "7")  # of this process, not of a worker
    program = tmp_path / "worker.py"
    program.write_text(
        "import os, sys\nprint('seconds 0', flush=True)\n"
        "for _ in sys.stdin: print('seconds', float(sys.argv[1]) + int(os.environ['OMP_NUM_THREADS']), flush=True)\n"
        "open(sys.argv[2] + sys.argv[1], 'w').write(os.environ.get('RANK', 'none'))\n"
    )
    workers = Workers(lambda rank: [sys.executable, str(program), str(rank), str(tmp_path / "done")], Setting(2, 3))
    assert [workers(), workers()] == [4.0, 4.0]  # of the slower one: 1 + 3 threads
    workers.close()
    assert [(tmp_path / f"done{rank}").read_text() for rank in (0, 1)] == ["none", "none"]
    program.write_text("import sys\nsys.exit('no memory')")
    with pytest.raises(Failed, match="ended with status 1: no memory"):
        Workers(lambda rank: [sys.executable, str(program)], Setting(1, 1))


def test_shares_of_a_rollout_are_the_whole():
    case = rollout.Case([[3], [4, 4], [5]], 2, [1, 2, 3, 4, 5, 6])
    first, second = case.share(0, 2), case.share(1, 2)
    assert first == rollout.Case([[3], [5]], 2, [1, 2, 5, 6]) and second == rollout.Case([[4, 4]], 2, [3, 4])
    assert case.share(0, 1) == case and case.first(1, 9) == rollout.Case([[3]], 2, [9, 9])
    line = command("rollout", "plain", "megarl", TWO, quick=True)(1)
    assert line[2:] == ["rollout", "--case", "plain", "--side", "megarl", "--share", "1/2", "--quick"]


@pytest.mark.long
def test_megarl_generates_in_a_worker():
    options = comparisons.Options(True, None, None, 64, 16)
    sides = {"megarl": comparisons.served("rollout", "plain", "megarl", options), "vllm": comparisons.vllm(
        rollout.CASES["plain"](), None, options)}  # fmt: skip
    results = bench.compare(Comparison("rollout plain", sides), [Setting(1, 1)], 1)
    assert results["megarl"].failure is None and len(results["megarl"].seconds) == 1
    assert results["vllm"].failure == "not installed: set --vllm-python"


@pytest.mark.parametrize(("output", "expected"), [
    ("[rank0]: Traceback\n[rank0]: ModuleNotFoundError: No module named 'trl'\nE1123 elastic failed\n=====\n",
     "ModuleNotFoundError: No module named 'trl'"),
    ("a\nno room\n", "no room"), ("", "no output"), ("torch.OutOfMemoryError: CUDA\n-", "torch.OutOfMemoryError: CUDA"),
])  # fmt: skip
def test_the_reason_of_a_failure_is_its_error(output, expected):
    assert comparisons.reason(output) == expected


def test_the_default_setting_is_what_the_launcher_chooses(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the tests, not of a run
    choice = (
        "import os, sys; 'OMP_NUM_THREADS' in os.environ and sys.exit('limited'); print('noise'); print(2, sys.argv[1])"
    )
    monkeypatch.setattr(comparisons, "CHOICE", choice)
    assert comparisons.default_setting(["3"]) == Setting(2, 3)
    monkeypatch.setattr(comparisons, "CHOICE", "import sys; sys.exit('no choice')")
    with pytest.raises(Failed, match="no choice"):
        comparisons.default_setting([])


def test_busy_loops_end_with_their_block(monkeypatch):
    started, popen = [], bench.subprocess.Popen
    monkeypatch.setattr(bench.subprocess, "Popen", lambda command: started.append(popen(command)) or started[-1])
    with bench.busy_loops(2):
        assert [loop.poll() for loop in started] == [None, None]
    assert all(loop.returncode is not None for loop in started) and len(started) == 2


def test_wrong_flags(tmp_path, refusal):
    cases = ((["--only", "rollout,speed"], "--only speed: allowed are rollout, step, module, images, lora, logprob"),
             (["--rounds", "0"], "--rounds 0: must be at least 1"),
             (["--busy", "-1"], "--busy -1: must be at least 0"),
             (["--settings", "1x2,2"], "--settings 1x2,2: allowed are RANKSxTHREADS, separated by commas"),
             (["--vllm-python", "no-such-python"], "--vllm-python no-such-python: no such program"),
             (["--lora-model", str(tmp_path)], f"--lora-model {tmp_path}: no Hugging Face folder"))  # fmt: skip
    for argv, message in cases:
        assert message in refusal(bench.main, argv)
