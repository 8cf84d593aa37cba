"""The GPU check: stages end, fail and hang without stopping the next, and its PPO stage runs, here on a CPU."""

import json
from pathlib import Path

import pytest
import torch

from megarl.mcore.attention.backends import varlen
from megarl.mcore.recurrence import fused_chunks
from tests.helpers.models import reference_kernels
from tests.helpers.tools import load_tool
from tests.helpers.worlds import run_world, wait_until_gone
from tools.bench import common
from tools.gpu import difference, gap, kernels, ppo, run_all
from tools.gpu import programs as gpu_programs

check = load_tool("gpu_check")
ROOT = Path(__file__).parents[2]

SMALL = (
    "--num-layers 1 --hidden-size 32 --ffn-hidden-size 32 --num-attention-heads 2 --swiglu --normalization RMSNorm"
    " --disable-bias-linear --make-vocab-size-divisible-by 32"
)
PPO = (
    "--prompts-per-step 4 --samples-per-prompt 2 --max-prompt-length 8 --max-response-length 4 --train-iters 2"
    " --reward exact-match --advantage gae --lr 1e-5 --critic-lr 1e-5 --bf16 --rollout-buffer-gb 0.001 --trackers none"
)


@pytest.mark.long
def test_a_stage_never_stops_the_next(tmp_path, monkeypatch, capsys):
    report = "import sys; from tools.gpu import report; report(found=1)"
    hangs = "import os, time; print(os.fork(), flush=True); time.sleep(1e6)"
    stages = {"ends": report, "fails": f"{report}; sys.exit(3)", "hangs": hangs}
    monkeypatch.setattr(
        check, "STAGES", {name: (20 - 15 * (name == "hangs"), ["-c", code]) for name, code in stages.items()}
    )
    monkeypatch.setattr(check.torch.cuda, "is_available", lambda: True)
    assert check.main(["--out", str(tmp_path)]) == 1
    written = json.loads((tmp_path / "report.json").read_text())
    assert [row["status"] for row in written] == ["passed", "failed with status 3", "stopped after 5 s"]
    assert all(row["results"] == [{"found": 1}] for row in written[:2])
    started = max(map(int, (tmp_path / "hangs.log").read_text().split()))  # what the stage has started ends with it
    assert started > 1 and wait_until_gone([started])


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


def test_the_commands_of_the_page_end_within_ten_minutes():
    page = (ROOT / "docs/gpu.md").read_text()
    commands = [line.partition("#")[0].split()[2:] for line in page.splitlines() if "gpu_check.sh " in line]
    commands = [stages for stages in commands if stages and {*stages} <= {*check.STAGES}]
    assert len(commands) == 2 and {*sum(commands, []), "tests"} == {*check.STAGES}
    assert all(sum(check.STAGES[name][0] for name in stages) <= 600 for stages in commands)


def passes(product: float, read: float) -> difference.Pass:
    """A pass over two tokens of which one row differs where a number is not 0."""
    rows = torch.ones(2, 3)
    return difference.Pass([(0, 7), (1, 8)], {
        ("norm", 0, "reads"): rows, ("norm", 0, "writes"): rows, ("product", 0, "reads"): rows,
        ("product", 0, "writes"): rows + torch.tensor([[0], [product]]),
        ("attention", 0, "reads"): rows + torch.tensor([[read], [0]]), ("attention", 0, "writes"): rows,
    })  # fmt: skip


@pytest.mark.parametrize(
    "product, read, first",
    [(0, 0, None), (0.5, 0, ["product", 0, "writes"]), (0, 0.25, ["attention", 0, "reads"])],
)  # fmt: skip
def test_the_first_kernel_that_differs_is_named(product, read, first):
    found = difference.compare([passes(product, read)], passes(0, 0))
    assert found["rows_compared"] == 12
    assert (found["first"] and [*found["first"]["kernel"]]) == first
    assert found["equal_reads_and_other_writes"]["product"] == [2, int(product > 0)]


@pytest.mark.parametrize(
    "step, text, fault",
    [({}, "7", None), ({"actor/loss": 1.001}, "7", None), ({"actor/loss": 1.01}, "7", "differs from the CPU"),
     ({"actor/loss": float("nan")}, "7", "differs from the CPU"), ({}, "8", "differs from the CPU"),
     ({"rollout/logprob_gap_max": 0.01}, "7", "gap")],
)  # fmt: skip
def test_a_program_is_compared_with_the_cpus(step, text, fault, tmp_path):
    row = {"step": 1, "actor/loss": 1.0, "rollout/logprob_gap_max": 0.0}
    for place, numbers, response in (("device", row | step, text), ("cpu", row, "7")):
        (tmp_path / place / "run/samples").mkdir(parents=True)
        (tmp_path / place / "run/metrics.jsonl").write_text(json.dumps(numbers) + "\n")
        sample = json.dumps({"prompt": "3+4=", "response": response})
        (tmp_path / place / "run/samples/step_00000001.jsonl").write_text(sample + "\n")
    statuses = [(0, tmp_path / place, "") for place in ("device", "cpu")]
    assert gpu_programs.compare("fp32 --top-k 3", *statuses).get("fault") == fault


@pytest.mark.parametrize(
    "error, key", [("megarl: error: --x 1: allowed is 2\n", "refused"), ("Traceback\nX\n", "fault")]
)
def test_a_program_that_fails_is_a_fault_and_one_that_is_refused_is_told(error, key):
    assert {*gpu_programs.compare("bf16", (2, Path("nowhere"), error), None)} == {key}


def test_programs_without_time_are_named_and_programs_of_a_folder_are_found(tmp_path, capsys):
    (tmp_path / "statuses.jsonl").write_text('["fp32 a", 0, "3", ""]\n["bf16 b", null, null, ""]\n')
    statuses = gpu_programs.statuses_of(tmp_path)
    assert statuses["fp32 a"] == (0, tmp_path / "3", "")
    found = {"fp32 a": {"gap_max": 0.0, "norms": [1.0], "share": 0.5, "of": "step 1 actor/loss"},
             "bf16 b": gpu_programs.compare("bf16 b", statuses["bf16 b"], None)}  # fmt: skip
    assert gpu_programs.summarise(found, 1) and not gpu_programs.summarise(found, 2)
    assert not gpu_programs.summarise({}, 0)
    told = json.loads(capsys.readouterr().out.splitlines()[0])
    assert told["programs"] == told["compared"] == told["trained"] == 1 and told["not_begun"] == ["bf16 b"]


@pytest.mark.long
def test_the_ppo_stage_compares_deterministic_runs(monkeypatch, capsys):
    monkeypatch.setattr(ppo, "SHAPE", SMALL)
    monkeypatch.setattr(ppo, "RL", PPO)
    monkeypatch.setattr(ppo, "CASES", {name: flags for name, flags in ppo.CASES.items() if "deterministic" in name})
    with pytest.raises(SystemExit) as ended:
        ppo.main([])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ended.value.code == 0, rows
    assert [row["ppo"] for row in rows[:-1]] == ["deterministic 1", "deterministic 2"]
    assert all(step["actor/ppo_kl_first"] == 0 for row in rows[:-1] for step in row["steps"] if step)
    last = {*rows[0]["steps"][-1]}
    assert {*ppo.SHOWN} - last == {"memory/actor/peak_bytes"}  # which only a device has
    assert rows[-1] == {"equal_runs": [["deterministic 1", "deterministic 2"]], "different": []}


@pytest.mark.long
@pytest.mark.parametrize("name", ["varlen", "sampling", "swiglu", "experts", "delta_rule"])
def test_checks_of_kernels_run(name, monkeypatch, capsys):
    """On a CPU, with Triton's interpreter, and with a stand-in for flash attention."""
    small = {"DEVICE": "cpu", "ROWS": 6, "VOCAB": 250, "PADDED": 256, "HIDDEN": 32, "FFN": 40, "EXPERT_FFN": 16,
             "DELTA_HEADS": (1, 2, 16, 16), "DELTA_TOKENS": 70, "timed": lambda function: function() and 0}  # fmt: skip
    monkeypatch.setattr(fused_chunks, "version", lambda: None)
    for constant, value in small.items():
        monkeypatch.setattr(kernels, constant, value)
    monkeypatch.setattr(varlen, "flash_kernel", lambda: reference_kernels.flash)
    assert getattr(kernels, name)(), capsys.readouterr().out
    assert json.loads(capsys.readouterr().out)["kernel"]


def run_gap(rank):
    shape, sizes = common.Shape(layers=1, hidden=64, ffn=64, vocab=64), (8, 6, 5)
    experts = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
    cases = [("", False), ("--exact-rollout", False), (experts, False), (experts, True)]
    return [gap.gaps(*case, shape, sizes).tolist() for case in cases]


def test_the_gap_is_that_of_each_generated_token():
    (found,) = run_world(run_gap, 1)
    assert [len(values) for values in found] == [30] * 4
    assert all(value < 0.1 for values in found for value in values)  # and 0 on a CPU that multiplies bf16
