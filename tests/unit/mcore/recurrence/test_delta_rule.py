"""The gated delta rule against transformers' code in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megarl.mcore.kernels import native
from megarl.mcore.recurrence import apply_rule
from megarl.mcore.recurrence.delta_rule import HeadSizes, Inputs
from tests.helpers.models.recurrent_inputs import (
    BOUNDED,
    CHANNELS,
    DELTA,
    STREAMS,
    drawn,
    expected_of,
    leaves,
    relative,
    runs_of,
)
from tests.helpers.tiers import by_default

pytestmark = pytest.mark.skipif(not native.is_built(), reason=native.absence())


def by_transformers(inputs: Inputs, sizes: HeadSizes) -> Tensor:
    """[T, H, V] of one sequence: the layer's code of Qwen3-Next, Kimi-Linear or Ling 3 between its projections and its
    norm."""
    from transformers.models.bailing_hybrid.modeling_bailing_hybrid import recurrent_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    groups, heads, keys, values = sizes[:4]
    channels, taps = inputs.weight.shape[0], inputs.weight.shape[2]
    mixed = functional.conv1d(inputs.x.t()[None], inputs.weight, padding=taps - 1, groups=channels)[
        ..., : len(inputs.x)
    ]
    query, key, value = functional.silu(mixed)[0].t()[None].split((groups * keys, groups * keys, heads * values), -1)
    query, key = (part.unflatten(-1, (groups, keys)).repeat_interleave(heads // groups, 2) for part in (query, key))
    before = (inputs.a + inputs.biases).unflatten(1, (heads, -1))
    rates = inputs.decay_logs.exp().unsqueeze(1)
    log_decays = -rates * functional.softplus(before)
    if sizes.bound is not None:
        log_decays = sizes.bound * (rates * before).sigmoid()
    by_channel = sizes.decays > 1
    rule = recurrent_kimi_delta_attention if by_channel else torch_recurrent_gated_delta_rule
    log_decays = log_decays if by_channel else log_decays.squeeze(-1)
    found, _ = rule(
        query, key, value.unflatten(-1, (heads, values)), log_decays[None], inputs.b.sigmoid()[None],
        initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return found[0]


CASES = [(*stream, sizes) for stream in STREAMS for sizes in (DELTA, CHANNELS, BOUNDED)]


# By default of those with more decays the stream that shares rows, in which some sequences are alone, too.
@pytest.mark.parametrize("holders, prefixes, sizes", by_default(CASES, (CASES[0], *CASES[3:])), ids=[
    "alone-heads", "alone-channels", "alone-bounded", "shared-heads", "shared-channels", "shared-bounded",
])  # fmt: skip
def test_results_and_gradients_are_those_of_transformers(holders, prefixes, sizes):
    runs = runs_of(holders=holders, prefixes=prefixes)
    inputs = drawn(runs.rows, sizes)
    grad, expected, exact_gradients = expected_of(by_transformers, inputs, sizes, holders, prefixes)
    wide = leaves(inputs, torch.float64)
    precise = wide.by_chunks(sizes, runs)
    gradients = torch.autograd.grad(precise, wide, grad.double())
    assert relative(precise.detach(), expected) <= 2e-6  # transformers computes in fp32
    for name, one, other in zip(Inputs._fields, gradients, exact_gradients, strict=True):
        assert relative(one, other) <= 2e-5, name
    for rule in (apply_rule, Inputs.by_chunks):
        own = leaves(inputs)
        found = rule(own, sizes, runs)
        assert relative(found.detach(), precise.detach()) <= (1e-6 if rule is apply_rule else 1e-5)
        for name, one, other in zip(Inputs._fields, torch.autograd.grad(found, own, grad), gradients, strict=True):
            assert relative(one, other) <= 5e-5, (rule.__name__, name)
