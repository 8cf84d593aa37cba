"""Generation ahead on emulated CUDA devices: no weights are overwritten that a graph, a kernel or a send reads."""

import pytest

from tests.emulator.programs import needs_emulator
from tests.helpers.programs import metrics, rl_argv

pytestmark = [needs_emulator, pytest.mark.long]
APART = "--role-map rollout=0;reward=0;reference=0;actor=1;critic=1"  # calls are counted on the first rank
SHAPE = (  # some weights are received in their place, others are staged
    "--hidden-size 256 --max-response-length 12 --max-tokens-per-microbatch 60 --train-iters 4 --eval-interval 0"
    " --save-interval 0"
)
RECORDED = "--generation-schedule recorded"


def argv(save, lag: int, flags: str) -> list[str]:
    flags = f"{SHAPE} {APART} --bf16 --rollout-correction tis --generation-lag {lag} {flags}"
    return rl_argv(save, flags, warm_start=False)


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("schedule", ["", RECORDED], ids=["fixed", "recorded"])
@pytest.mark.parametrize("fault", ["none", "taken_while_a_graph_runs"])
def test_weights_come_when_nobody_reads_those_before(lag, schedule, fault, emulator, tmp_path):
    """Neither a graph of the last step, nor one that was launched ahead, nor a copy that is on its way."""
    counts = emulator.run("weights", [fault, *argv(tmp_path, lag, f"{schedule} --verify-weights")], ranks=2)
    assert counts["graph launch"] >= 20 and counts["nccl recv"] == 25  # of the start and of each step
    rows = metrics(tmp_path)
    if schedule:  # it took weights within a round
        assert max(row.get("rollout/mixed_version_fraction", 0) for row in rows.values()) > 0
    else:
        assert [rows[step]["rollout/staleness"] for step in (1, 2, 3, 4)] == [min(lag, age) for age in range(4)]


FAULTS = {  # of `weight_faults.py` -> what names it
    "received_on_a_stream_of_its_own": ("overwrites what a graph's", "on the default stream reads"),
    "read_before_they_are_there": ("on the default stream reads what nccl recv on NCCL's stream", "writes"),
    "one_slot_for_all_steps": ("aten::copy_ on the default stream overwrites what nccl send on NCCL's stream", "reads"),
    "sent_from_the_module": ("on the default stream overwrites what nccl send on NCCL's stream", "reads"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("schedule", ["", RECORDED], ids=["fixed", "recorded"])
def test_weights_that_come_too_early_are_found(fault, schedule, emulator, tmp_path):
    texts = emulator.error(fault, 2, argv(tmp_path, 2, schedule))
    found = next(line for line in texts.splitlines() if "emulator: " in line and "without waiting for it" in line)
    assert all(text in found for text in FAULTS[fault]), found
