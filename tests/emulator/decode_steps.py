"""Launches and waits of the host in a decode step of a model with experts, by layer, on emulated devices.

    python -m tests.emulator [--ranks N] tests.emulator.decode_steps [FLAG …]

Without flags the model has the experts of Qwen3-30B-A3B, sharded over all ranks. Models of one and of two tiny layers
are compared: what the second adds is a layer's, the rest is the step's. An operator counts as one launch; some take
several kernels on a GPU.
"""

import functools
import json
import os
import sys
from collections import Counter

import operators  # type: ignore[import-not-found]
import torch
import torch.distributed as dist

from tests.emulator import nccl
from tests.helpers.models.tiny_models import VOCAB, build
from tests.helpers.rollout.engines import make_requests, settings_of

STEPS = 8  # of a response
SHAPE = (
    "--num-experts 128 --moe-router-topk 8 --hidden-size 64 --moe-ffn-hidden-size 16 --num-query-groups 4"
    " --qk-layernorm"
)
FORMS = {  # of decode steps -> (as graphs, with as many rows on all ranks)
    "graphs": (True, True),
    "kernel by kernel": (False, True),
    "by numbers of rows": (False, False),
}
waits: Counter = Counter()


def main():
    """Prints a line of JSON for each form of decode steps."""
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl", **alone)
    _count_waits()
    ranks, flags = dist.get_world_size(), " ".join(sys.argv[1:])
    for form, (has_graphs, has_equal_rows) in FORMS.items():
        steps = []
        for layers in (1, 2):
            shape = f"{SHAPE} --num-layers {layers} --expert-model-parallel-size {ranks}"
            steps.append(_step_of(f"--bf16 --moe-grouped-gemm {shape} {flags}", has_graphs, has_equal_rows))
        if dist.get_rank() == 0:
            layer = {name: steps[1][name] - steps[0][name] for name in steps[0]}
            rest = {name: steps[0][name] - layer[name] for name in layer}
            print(json.dumps({"ranks": ranks, "decode steps": form, "a layer": layer, "besides": rest}), flush=True)
    dist.destroy_process_group()


def _count_waits():
    """Counts how often the host waits for the device."""
    real = nccl._host_waits

    def count():
        waits["host waits"] += 1
        real()

    nccl._host_waits = count
    operators.on_host_wait(count)


def _step_of(flags: str, has_graphs: bool, has_equal_rows: bool) -> dict[str, int]:
    """Counts of the last of several decode steps that no request joins or leaves."""
    from megarl.mcore.inference.engine import RolloutEngine
    from megarl.mcore.moe.layer import MixtureLayer

    model, _, place = build(flags)
    engine = RolloutEngine(model, place.pg_collection, VOCAB, 48, 0.005, 8, decode_graphs=has_graphs)
    if not has_equal_rows:
        MixtureLayer.max_equal_rows = 0  # type: ignore[assignment,method-assign]
    found, real = [], engine.engine.step_modern

    def step():
        found.append(_counts())
        return real()

    engine.engine.step_modern = step
    engine.generate(make_requests(STEPS, 8), (), settings_of(), routes=True)
    return {name: found[-1][name] - found[-2][name] for name in found[-1]}


def _counts() -> dict[str, int]:
    """Of launches, of collectives among them, and of waits, since the process began."""
    inner, counts = _operators_of_formulas(), operators.counts()
    launches = _sum_of(("aten", "triton", "nccl", "graph"))
    launches -= sum(more * counts.get(name, 0) for name, more in inner.items())
    return {"launches": launches, "collectives": _sum_of(("nccl",)), "host waits": waits["host waits"]}


def _sum_of(starts: tuple[str, ...]) -> int:
    return sum(count for name, count in operators.counts().items() if name.startswith(starts))


@functools.cache
def _operators_of_formulas() -> dict[str, int]:
    """How many operators the emulator runs within one that is a single kernel on a device."""
    x = torch.ones(4, 64, dtype=torch.bfloat16, device="cuda")
    formulas = {
        "aten::_fused_rms_norm": lambda: torch.rms_norm(x, (64,), x[0]),
        "aten::mm.dtype": lambda: torch.mm(x, x.t(), out_dtype=torch.float32),
    }
    found = {}
    for name, formula in formulas.items():
        before, calls = _sum_of(("aten",)), operators.counts().get(name, 0)
        formula()
        assert operators.counts()[name] == calls + 1
        found[name] = _sum_of(("aten",)) - before - 1
    return found


if __name__ == "__main__":
    main()
