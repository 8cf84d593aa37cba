"""Pipeline stages of decode steps that the device plans: the responses of Megatron's own exchange."""

import pytest

from tests.helpers.pages.combinations import RECURRENT
from tests.helpers.rollout.engine_layouts import generate_in_layout
from tests.helpers.rollout.engines import LIMIT, on_device
from tests.helpers.tiers import long
from tests.helpers.worlds import run_world

PP2 = "--pipeline-model-parallel-size 2"


EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"


@pytest.mark.parametrize("ranks, flags", [
    (2, PP2), long((2, f"{PP2} {RECURRENT}")), long((2, f"{PP2} --untie-embeddings-and-output-weights")),
    long((4, f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel")), long((2, f"{PP2} {EXPERTS}")),
], ids=str)  # fmt: skip
def test_pipeline_stages_plan_what_megatron_plans(ranks, flags):
    how = flags, {"temperature": 1.2}, (3,)
    expected = run_world(generate_in_layout, ranks, *how)
    found = run_world(on_device, ranks, generate_in_layout, *how)
    for (completions, gap, device_steps, _), (others, _) in zip(found, expected, strict=True):
        assert {i: c.tokens for i, c in completions.items()} == {i: c.tokens for i, c in others.items()}
        assert gap < 1e-5 and device_steps >= LIMIT - 2
