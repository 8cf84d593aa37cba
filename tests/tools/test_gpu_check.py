"""The GPU check: stages end, fail and hang without stopping the next, and its PPO stage runs, here on a CPU."""

import json

import pytest

from megarl.mcore.attention.backends import varlen
from tests.helpers import reference_kernels
from tests.helpers.tools import load_tool
from tests.helpers.worlds import run_world
from tools.bench import common
from tools.gpu import gap, kernels, ppo, run_all

check = load_tool("gpu_check")

SMALL = (
    "--num-layers 1 --hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 2 --swiglu --normalization RMSNorm"
    " --disable-bias-linear --make-vocab-size-divisible-by 32"
)
PPO = (
    "--prompts-per-step 4 --samples-per-prompt 2 --max-prompt-length 8 --max-response-length 4 --train-iters 2"
    " --reward exact-match --advantage gae --lr 1e-5 --critic-lr 1e-5 --bf16 --rollout-buffer-gb 0.001 --trackers none"
)


def test_a_stage_never_stops_the_next(tmp_path, monkeypatch, capsys):
    report = "import sys; from tools.gpu import report; report(found=1)"
    stages = {"ends": report, "fails": f"{report}; sys.exit(3)", "hangs": f"{report}; import time; time.sleep(1e6)"}
    monkeypatch.setattr(
        check, "STAGES", {name: (20 - 15 * (name == "hangs"), ["-c", code]) for name, code in stages.items()}
    )
    monkeypatch.setattr(check.torch.cuda, "is_available", lambda: True)
    assert check.main(["--out", str(tmp_path)]) == 1
    written = json.loads((tmp_path / "report.json").read_text())
    assert [row["status"] for row in written] == ["passed", "failed with status 3", "stopped after 5 s"]
    assert all(row["results"] == [{"found": 1}] for row in written[:2])


def test_a_case_that_fails_or_is_out_of_bounds_is_counted_and_stops_no_other(capsys):
    ran = []
    cases = {
        "raises": lambda: 1 / 0,
        "is wrong": lambda: False,
        "is right": lambda: True,
        "measures": lambda: ran.append(1),
    }
    with pytest.raises(SystemExit) as ended:
        run_all(cases)
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert ended.value.code == 2 and ran == [1]
    assert row == {"case": "raises", "failure": "ZeroDivisionError: division by zero"}


@pytest.mark.parametrize(
    "arguments, says", [([], "no CUDA device"), (["decodes"], "stage decodes: allowed are versions")]
)
def test_wrong_use_is_one_line(tmp_path, arguments, says):
    with pytest.raises(check.UsageError, match=says):
        check.main([*arguments, "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_stages_end_within_ten_minutes():
    assert sum(seconds for seconds, _ in check.STAGES.values()) <= 600


@pytest.mark.long
def test_the_ppo_stage_compares_deterministic_runs(monkeypatch, capsys):
    monkeypatch.setattr(ppo, "SHAPE", SMALL)
    monkeypatch.setattr(ppo, "RL", PPO)
    monkeypatch.setattr(ppo, "CASES", {name: flags for name, flags in ppo.CASES.items() if "deterministic" in name})
    with pytest.raises(SystemExit) as ended:
        ppo.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ended.value.code == 0, rows
    assert [row["ppo"] for row in rows[:-1]] == ["deterministic 1", "deterministic 2"]
    assert all(step["actor/ppo_kl_first"] == 0 for row in rows[:-1] for step in row["steps"] if step)
    last = {*rows[0]["steps"][-1]}
    assert {*ppo.SHOWN} - last == {"memory/actor/peak_bytes"}  # which only a device has
    assert rows[-1] == {"deterministic_runs_equal": True}


@pytest.mark.long
@pytest.mark.parametrize("name", ["varlen", "sampling", "swiglu", "experts"])
def test_checks_of_kernels_run(name, monkeypatch, capsys):
    """On a CPU, with Triton's interpreter, and with a stand-in for flash attention."""
    small = {"DEVICE": "cpu", "ROWS": 6, "VOCAB": 250, "PADDED": 256, "HIDDEN": 32, "FFN": 40, "EXPERT_FFN": 16}
    for constant, value in small.items():
        monkeypatch.setattr(kernels, constant, value)
    monkeypatch.setattr(varlen, "flash_kernel", lambda: reference_kernels.flash)
    assert getattr(kernels, name)(), capsys.readouterr().out
    assert json.loads(capsys.readouterr().out)["kernel"]


def run_gap(rank):
    gap.SHAPE, gap.REQUESTS = common.Shape(layers=1, hidden=64, ffn=64, vocab=64), 5
    gap.PROMPT, gap.RESPONSE = 8, 6
    gap.EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
    cases = [("", False), ("--exact-rollout", False), (gap.EXPERTS, False), (gap.EXPERTS, True)]
    return [gap.gaps(*case).tolist() for case in cases]


def test_the_gap_is_that_of_each_generated_token():
    (found,) = run_world(run_gap, 1)
    assert [len(values) for values in found] == [30] * 4
    assert all(value < 0.1 for values in found for value in values)  # and 0 on a CPU that multiplies bf16
