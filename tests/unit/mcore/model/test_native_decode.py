"""Decode steps by one compiled operator: the bits of a step that goes through the layers one by one."""

import pytest

from megarl.mcore.kernels import native
from tests.helpers.rollout.engines import NEVER, make_engine, make_requests, settings_of
from tests.helpers.worlds import run_world


def by_operator_and_by_layers(rank: int, flags: str):
    """(steps that the operator ran, whether both ways gave the same completions)."""
    from megarl.mcore.model import native_decode

    engine, *_ = make_engine(flags)
    steps, run = [], native_decode._run
    native_decode._run = lambda *arguments: (steps.append(1), run(*arguments))[1]
    requests = make_requests(6, 8)
    by_operator, count = engine.generate(requests, NEVER, settings_of()), len(steps)
    native_decode._supports = lambda *_: False
    by_layers = engine.generate(requests, NEVER, settings_of())
    return count, len(steps) == count, by_operator == by_layers


@pytest.mark.skipif(not native.is_built(), reason=native.absence())
@pytest.mark.parametrize(
    "flags, runs", [("", True), ("--qk-layernorm --add-qkv-bias", True), ("--window-size 3,0", False)]
)
def test_the_operator_has_the_bits_of_the_layers_and_runs_plain_ones_alone(flags, runs):
    ((count, layers_alone, same),) = run_world(by_operator_and_by_layers, 1, flags)
    assert layers_alone and same and (count > 0) == runs
