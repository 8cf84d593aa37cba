"""Mamba-2's state space against transformers' code, and its recurrence in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megarl.mcore.kernels import native
from megarl.mcore.recurrence import apply_rule
from megarl.mcore.recurrence.runs import NONE, Runs
from megarl.mcore.recurrence.state_space import SpaceInputs, SpaceSizes
from tests.helpers.models.recurrent_inputs import (
    SPACE,
    STREAMS,
    TAPS,
    drawn,
    empty_states,
    expected_of,
    leaves,
    relative,
    runs_of,
)

pytestmark = pytest.mark.skipif(not native.is_built(), reason=native.absence())


def by_transformers(inputs: SpaceInputs, sizes: SpaceSizes) -> Tensor:
    """[T, H, P] of one sequence: the recurrence of Nemotron-H's layer, a token at a time."""
    groups, heads, keys, values = sizes[:4]
    channels, taps = inputs.weight.shape[0], inputs.weight.shape[2]
    mixed = functional.conv1d(inputs.x.t()[None], inputs.weight, inputs.bias, padding=taps - 1, groups=channels)[
        0, :, : len(inputs.x)
    ]
    x, b, c = functional.silu(mixed).t().split((heads * values, groups * keys, groups * keys), -1)
    b, c = (part.unflatten(-1, (groups, keys)).repeat_interleave(heads // groups, 1) for part in (b, c))
    x, state, found = x.unflatten(-1, (heads, values)), 0.0, []
    steps = functional.softplus(inputs.steps + inputs.biases).clamp_min(sizes.min_step)
    for t in range(len(x)):
        decay = torch.exp(-inputs.decay_logs.exp() * steps[t])[:, None, None]
        state = decay * state + (steps[t, :, None] * b[t])[:, None] * x[t, :, :, None]
        found.append((state @ c[t, :, :, None]).squeeze(-1) + inputs.skips[:, None] * x[t])
    return torch.stack(found)


@pytest.mark.parametrize("holders, prefixes", STREAMS, ids=["alone", "shared"])
def test_results_and_gradients_are_those_in_float64(holders, prefixes):
    runs = runs_of(holders=holders, prefixes=prefixes)
    inputs = drawn(runs.rows, SPACE)
    grad, expected, gradients = expected_of(by_transformers, inputs, SPACE, holders, prefixes)
    for rule in (apply_rule, SpaceInputs.by_chunks):
        own = leaves(inputs)
        found = rule(own, SPACE, runs)
        assert relative(found.detach(), expected) <= 2e-6
        for name, one, other in zip(SpaceInputs._fields, torch.autograd.grad(found, own, grad), gradients, strict=True):
            assert relative(one, other) <= 1e-5, (rule.__name__, name)


def test_the_recurrence_is_that_of_transformers():
    """Its scan by chunks, which works in fp32."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    groups, heads, keys, values, min_step = SPACE
    rows = 150
    inputs = drawn(rows, SPACE)
    mixed = functional.conv1d(inputs.x.t()[None], inputs.weight, inputs.bias, padding=TAPS - 1, groups=SPACE.channels)
    x, b, c = functional.silu(mixed[0, :, :rows]).t()[None].split((heads * values, groups * keys, groups * keys), -1)
    expected = mamba2_chunk_scan(
        x.unflatten(-1, (heads, values)), inputs.steps[None], -inputs.decay_logs.exp(), b.unflatten(-1, (groups, keys)),
        c.unflatten(-1, (groups, keys)), chunk_size=64, D=inputs.skips, dt_bias=inputs.biases, dt_softplus=True,
        dt_limit=(min_step, float("inf")),
    )  # fmt: skip
    found = apply_rule(inputs, SPACE, Runs(torch.tensor([[0, rows, NONE, NONE]]), 0, TAPS), empty_states(1, SPACE))
    assert relative(found, expected[0].double()) <= 2e-6
