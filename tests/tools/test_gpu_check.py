"""The GPU check: stages end, fail and hang without stopping the next, and its PPO stage runs, here on a CPU."""

import json
import subprocess
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megarl.mcore.attention.backends import varlen
from megarl.mcore.kernels.cuda import operator
from megarl.mcore.recurrence import fused_chunks
from tests.helpers import forked_programs
from tests.helpers import programs as small
from tests.helpers.models import reference_kernels
from tests.helpers.tools import load_tool
from tests.helpers.worlds import run_world, wait_until, wait_until_gone
from tools.bench import common
from tools.gpu import SIZES, difference, gap, kernels, ppo, program_rows, ranks, run_all
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


def test_a_stage_never_stops_the_next_and_the_report_is_written_after_each(tmp_path, monkeypatch):
    report, hanging = "import json, os; from tools.gpu import report; report(found=1)", 7
    codes = {
        "ends": f"{report}; print('no result')", "fails": f"{report}; raise SystemExit(3)", "is silent": "",
        "hangs": "import os, time; print(os.fork(), flush=True); time.sleep(1e6)",
        "reads": f"{report}; report(before=len(json.load(open('{tmp_path}/report.json'))), sizes=os.environ[SIZES])"
                 .replace("import report", "import SIZES, report"),
    }  # fmt: skip
    for name, code in codes.items():
        (tmp_path / f"stage_{name.replace(' ', '_')}.py").write_text(code)
    stages = {name: (hanging * (name == "hangs") or 600, [f"stage_{name.replace(' ', '_')}"]) for name in codes}

    class Stage(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout != check.SLOWER * hanging:
                return super().wait(timeout)
            assert wait_until((tmp_path / "hangs.log").read_text)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(check, "STAGES", stages)
    monkeypatch.setattr(check.subprocess, "Popen", Stage)
    monkeypatch.setattr(check.torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(SIZES, "")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    assert check.main([*codes, "--small", "--out", str(tmp_path)]) == 1
    written = {row["stage"]: row for row in json.loads((tmp_path / "report.json").read_text())}
    wanted = ["passed", "failed with status 3", "failed: it has printed nothing", "stopped after 210 s", "passed"]
    assert [row["status"] for row in written.values()] == wanted, written
    assert [row["results"] for row in written.values()] == [
        [{"found": 1}], [{"found": 1}], [], [], [{"found": 1}, {"before": 4, "sizes": "small"}]
    ]  # fmt: skip
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
    "arguments, says", [([], "no CUDA device"), (["decodes"], "stage decodes: allowed are short-a")]
)
def test_wrong_use_is_one_line(tmp_path, arguments, says):
    with pytest.raises(check.UsageError, match=says):
        check.main([*arguments, "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_each_group_ends_in_its_time_and_together_they_are_the_check():
    seconds = {name: sum(check.STAGES[stage][0] for stage in stages) for name, stages in check.GROUPS.items()}
    assert seconds["short-a"] <= 400 and seconds["short-b"] <= 300
    assert all(seconds[name] <= 600 for name in check.GROUPS if name.startswith("whole"))
    assert {*check.GROUPS["short"], *check.GROUPS["all"]} == {*check.STAGES}


def _hanging(program, argv, variables):
    if int(variables.get("RANK", 0)) == len(argv):
        raise ValueError("this rank has failed")
    (Path.cwd() / f"{program} {variables['RANK']}").touch()
    threading.Event().wait()


def test_worlds_that_fail_or_hang_are_told_and_stop_no_other(tmp_path, monkeypatch):
    """A rank that waits for one that has failed is ended with it; who runs too long says where it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(forked_programs, "run_here", _hanging)

    def now() -> float:
        others = Path("statuses.jsonl").read_text().count("\n") if Path("statuses.jsonl").exists() else 0
        return 1e3 * (others == 2 and all(Path(f"late {rank}").exists() for rank in (0, 1)))

    monkeypatch.setattr(gpu_programs, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    rows = {"late": ("late", lambda save: [0] * 9, 2), "fails": ("fails", lambda save: [0], 2),
            "alone": ("alone", lambda save: [], 1), "other": ("alone", lambda save: [], 1)}  # fmt: skip
    gpu_programs.run_programs(rows, tmp_path, ["late", "fails", "alone"], gpu_programs.Limits(3, 10, 100))
    found = gpu_programs.statuses_of(tmp_path)
    assert {name: row[0] for name, row in found.items()} == {"late": -9, "fails": 1, "alone": 1}
    assert found["late"][2].count("in _hanging") == 2 and "this rank has failed" in found["fails"][2]
    assert "longer than its limit" in gpu_programs.compare("fp32", found["late"], None)["fault"]


@pytest.mark.parametrize("kib, is_refused", [(48 << 10, False), ((48 << 10) + 1, True)])
def test_what_is_prepared_is_small_enough_to_travel(kib, is_refused, tmp_path, monkeypatch, capsys):
    prepared = []
    monkeypatch.setattr(check.programs, "prepare", lambda folder, only: prepared.append(only))
    monkeypatch.setattr(check.learn, "prepare", lambda: prepared.append("warm start"))
    monkeypatch.setattr(check, "ROOT", tmp_path)
    for name, size in (("packages/some", kib), ("cuda", 1 << 20)):  # the compiler stays
        (tmp_path / "build" / name).mkdir(parents=True)
        with open(tmp_path / "build" / name / "file", "wb") as file:
            file.truncate(size << 10)
    with pytest.raises(check.UsageError, match="have 48.0 MiB, and 48 may travel") if is_refused else nullcontext():
        assert check.main(["prepare", "--small", "--out", str(tmp_path)]) == 0
    assert prepared == [[f"fp32 {flags}" for flags in program_rows.WORLDS], "warm start"]
    assert "gpu_check: build/packages: 48.0 MiB" in capsys.readouterr().out


@pytest.mark.parametrize("number, is_enough", [(22809, False), (23007, True)])
def test_an_nccl_that_is_brought_along_is_preloaded_if_it_takes_several_ranks(number, is_enough, tmp_path, monkeypatch):
    library = tmp_path / "libnccl.so.2"
    source = f"int ncclGetVersion(int *version) {{ *version = {number}; return 0; }}"
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=source, text=True, check=True)
    monkeypatch.setattr(ranks, "LIBRARY", library)
    monkeypatch.setenv("LD_PRELOAD", "other.so")
    if is_enough:
        assert ranks.nccl_variables()["LD_PRELOAD"] == f"{library}:other.so"
    else:
        with pytest.raises(RuntimeError, match="NCCL 2.28.9 takes one rank on a device"):
            ranks.nccl_variables()


def test_worlds_that_nccl_has_passed_are_left_out(tmp_path, monkeypatch, capsys):
    names, asked = [*program_rows.worlds(False)], []

    def compared(kind, only, limits):
        asked.append(only)
        outcomes = (
            {"norms": [1.0], "gap_max": 0.0},
            {"norms": [1.0], "fault": "gap"},
            {"refused": "no"},
            {"waiting": True},
        )
        return {name: outcomes[min(number, 3)] for number, name in enumerate(only)}

    monkeypatch.setattr(gpu_programs, "compared", compared)
    monkeypatch.setattr(ranks, "PASSED", tmp_path / "gpu_ranks.json")
    monkeypatch.setattr(ranks, "nccl_variables", dict)
    monkeypatch.setattr(ranks.os, "environ", {})
    for backend, flags, left in (("nccl", [], names), ("staged", ["--not-passed"], names[1:])):
        monkeypatch.setattr("sys.argv", ["ranks", "--backend", backend, *flags])
        with pytest.raises(SystemExit) as ended:
            ranks.main()
        assert ended.value.code == 1 and asked[-1] == left
    assert json.loads((tmp_path / "gpu_ranks.json").read_text()) == names[:1]
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert told[-1] == {"backend": "staged", "worlds": len(names) - 1, "passed": names[1:2]}


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


class Embedding(torch.nn.Module):
    def forward(self, input_ids, position_ids):
        return input_ids.float()


def test_rows_of_kernels_are_recorded_and_what_changes_its_inputs_has_none():
    double = operator("test_doubles", torch.empty_like)(double_of)
    clear = operator("test_clears", lambda *_: None, mutates=("x",))(clears)
    model = SimpleNamespace(config=SimpleNamespace(num_moe_experts=None), embedding=Embedding())
    with difference.Recorder(model) as recorder:
        rows = model.embedding(torch.tensor([[7, 8]]), position_ids=torch.tensor([[0, 1]])).reshape(2, 1)
        cleared = double(rows).clone()
        clear(cleared)
    (found,) = recorder.passes
    assert found.tokens == [(0, 7), (1, 8)] and not cleared.any()
    assert {name: values.flatten().tolist() for name, values in found.rows.items()} == {
        ("megarl::test_doubles", 0, "reads"): [7, 8], ("megarl::test_doubles", 0, "writes"): [14, 16]
    }  # fmt: skip


def double_of(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def clears(x: torch.Tensor) -> None:
    x.zero_()


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


def test_inputs_made_before_are_copied_and_nothing_is_trained(tmp_path, monkeypatch):
    monkeypatch.setenv(small.INPUTS, str(tmp_path))
    monkeypatch.setattr(small, "train", None)
    (tmp_path / "train.jsonl").write_text("{}")
    monkeypatch.setattr(small, "made_inputs", small.made_inputs.__wrapped__)
    copy = small.inputs.__wrapped__()
    assert copy != tmp_path and [path.name for path in copy.iterdir()] == ["train.jsonl"]


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
