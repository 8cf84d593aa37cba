"""Several ranks on one emulated device over staged gloo: the numbers of emulated NCCL, to the bit."""

import pytest

from tests.emulator.programs import needs_emulator
from tests.helpers.programs import metrics, samples, timeless
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
