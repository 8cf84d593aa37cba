"""Several ranks on one emulated device over staged gloo: the numbers of emulated NCCL, to the bit."""

import json
import subprocess
import sys

import pytest

from tests.emulator.programs import needs_emulator
from tests.helpers.programs import ROOT, environment, metrics, samples, timeless
from tests.helpers.tiers import by_default
from tools.gpu import program_rows

pytestmark = needs_emulator
FSDP, TP4 = "--use-torch-fsdp2", "--tensor-model-parallel-size 4 --bf16"
ROWS = [*program_rows.WORLDS.items(), (FSDP, 2), (TP4, 4), (f"{program_rows.EP2} {program_rows.PP2} --bf16", 4)]


@pytest.mark.parametrize("flags, ranks", by_default(ROWS, [(program_rows.SHARDED, 2)]), ids=str)
def test_staged_gloo_changes_no_bit(flags, ranks, emulator, tmp_path):
    counts = {
        backend: emulator.run("rl", program_rows.argv_of(f"{flags} --decode-graphs off", tmp_path / backend), ranks,
                              backend)
        for backend in ("nccl", "staged")
    }  # fmt: skip
    assert any("nccl" in name for name in counts["nccl"]) and not any("nccl" in name for name in counts["staged"])
    found, wanted = (metrics(tmp_path / backend) for backend in ("staged", "nccl"))
    assert {*wanted} >= {1, 2}
    for step in (1, 2):
        assert wanted[step]["actor/grad_norm"] > 0
        assert timeless(found[step]) == timeless(wanted[step]), step
        assert samples(tmp_path / "staged", step) == samples(tmp_path / "nccl", step) != []


def test_each_kind_of_call_passes_but_in_a_capture(emulator):
    assert emulator.run("planted", ["staged"], 2, "staged")["aten::copy_"] > 20
    error = emulator.error("staged_in_a_capture", 2, backend="staged")
    assert "allreduce over staged gloo cannot be captured: --decode-graphs off" in error


@pytest.mark.long
@pytest.mark.parametrize("backend", ["nccl", "staged"])
def test_the_stage_compares_worlds_with_a_cpu(backend):
    """As on a device, in processes that are started for it."""
    command = [sys.executable, "-m", "tests.emulator", "tools.gpu.ranks", "--backend", backend]
    done = subprocess.run([*command, "--only=--context-parallel-size"], cwd=ROOT, capture_output=True, text=True,
                          env=environment(GPU_CHECK_SIZES="small"))  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = [f"{precision} --context-parallel-size 2" for precision in ("fp32", "bf16")]
    found = {row["world"]: row for row in rows if "world" in row}
    assert [*found] == rows[-1]["passed"] == wanted
    assert found[wanted[0]]["share"] < 1 and found[wanted[0]]["same_text"] and min(found[wanted[1]]["norms"]) > 0
