"""Decode steps planned on the device: on a CPU, with interpreted kernels, they give what those of the host give."""

import pytest

from tests.helpers import reference_kernels
from tests.helpers.engines import LIMIT, generate_standard, largest_gap, make_engine, make_requests, settings_of, texts
from tests.helpers.worlds import run_world

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"


def on_device(rank, flags="", sampling=None, routes=False, end=(), **engine_settings):
    """(completions, gap, decode steps that the device planned, that the host planned) of the standard requests."""
    from megarl.mcore.inference.decode_loop import DecodeLoopEngine
    from megarl.mcore.inference.device_decode import DeviceDecode

    reference_kernels.use_them()
    engine, model, _ = make_engine(f"--attention-backend varlen {flags}", **engine_settings)
    counts = {}
    for owner, name in ((DeviceDecode, "run"), (DecodeLoopEngine, "_decode")):
        counts[name] = 0

        def counted(self, name=name, real=getattr(owner, name)):
            counts[name] += 1
            return real(self)

        setattr(owner, name, counted)
    requests, settings = make_requests(), settings_of(**(sampling or {}))
    completions = engine.generate(requests, end, settings, routes)
    return completions, largest_gap(model, requests, completions, settings.temperature), *counts.values()


@pytest.mark.parametrize("ranks, flags", [
    (1, ""), (1, "--window-size 5,0"), (1, EXPERTS), (1, "--qk-layernorm --num-query-groups 4"),
    (2, "--tensor-model-parallel-size 2"), (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
], ids=str)  # fmt: skip
def test_the_device_plans_what_the_host_plans(ranks, flags):
    expected = run_world(generate_standard, ranks, flags)
    found = run_world(on_device, ranks, flags)
    for (completions, gap, device_steps, host_steps), (others, _) in zip(found, expected, strict=True):
        assert texts(completions) == texts(others)
        assert gap < 1e-5 and device_steps >= LIMIT - 2 and host_steps == 0
