"""Mamba-2's state space against transformers' code in float64, and the bits of a token under any cut."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megarl.batch import SharedPrefix
from megarl.mcore.attention.segments import TokenStream
from megarl.mcore.kernels import native
from megarl.mcore.recurrence.rule import apply_rule
from megarl.mcore.recurrence.runs import NONE, Runs, runs_of_stream
from megarl.mcore.recurrence.state_space import SpaceInputs, SpaceSizes
from megarl.mcore.recurrence.states import States

SIZES, TAPS = SpaceSizes(groups=2, heads=6, keys=24, values=32, min_step=0.01), 4
LENGTHS = (150, 67, 5, 9, 70, 1, 2, 23)
# Sequences 1 and 4 continue 66 tokens of the first one, and sequence 3 four of sequence 2.
HOLDERS, PREFIXES = (0, 0, 2, 2, 0, 5, 6, 7), (0, 66, 0, 4, 66, 0, 0, 0)

pytestmark = pytest.mark.skipif(not native.is_built(), reason=native.absence())


def drawn(rows: int, sizes: SpaceSizes = SIZES, seed: int = 0) -> SpaceInputs:
    """Inputs with decays between almost 0 and almost 1, and some steps below the smallest."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return SpaceInputs(
        x=normal(rows, sizes.channels), steps=normal(rows, sizes.heads), weight=normal(sizes.channels, 1, TAPS),
        bias=normal(sizes.channels), decay_logs=2 * normal(sizes.heads), biases=2 * normal(sizes.heads) - 3,
        skips=normal(sizes.heads),
    )  # fmt: skip


def stream(holders, prefixes, padding: int = 3) -> TokenStream:
    shared = SharedPrefix(torch.tensor(holders), torch.tensor(prefixes))
    return TokenStream.of(torch.tensor(LENGTHS).numpy(), shared, lambda tokens: tokens + padding)


def by_transformers(inputs: SpaceInputs, sizes: SpaceSizes) -> Tensor:
    """[T, H, P] of one sequence: the recurrence of Nemotron-H's layer, a token at a time."""
    groups, heads, keys, values = sizes[:4]
    channels, taps = inputs.weight.shape[0], inputs.weight.shape[2]
    mixed = functional.conv1d(
        inputs.x.t()[None], inputs.weight, inputs.bias, padding=taps - 1, groups=channels
    )[0, :, : len(inputs.x)]  # fmt: skip
    x, b, c = functional.silu(mixed).t().split((heads * values, groups * keys, groups * keys), -1)
    b, c = (part.unflatten(-1, (groups, keys)).repeat_interleave(heads // groups, 1) for part in (b, c))
    x, state, found = x.unflatten(-1, (heads, values)), 0.0, []
    steps = functional.softplus(inputs.steps + inputs.biases).clamp_min(sizes.min_step)
    for t in range(len(x)):
        decay = torch.exp(-inputs.decay_logs.exp() * steps[t])[:, None, None]
        state = decay * state + (steps[t, :, None] * b[t])[:, None] * x[t, :, :, None]
        found.append((state @ c[t, :, :, None]).squeeze(-1) + inputs.skips[:, None] * x[t])
    return torch.stack(found)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("holders, prefixes", [(range(8), (0,) * 8), (HOLDERS, PREFIXES)], ids=["alone", "shared"])
def test_results_and_gradients_are_those_in_float64(holders, prefixes):
    tokens = stream(list(holders), list(prefixes))
    runs = runs_of_stream(*tokens, TAPS)
    own = [torch.arange(start, end) for start, end in zip(tokens.starts, tokens.ends, strict=True)]
    firsts = zip(tokens.holders.tolist(), tokens.prefix_lengths.tolist(), strict=True)
    sequences = [torch.cat([own[holder][:length], rows]) for (holder, length), rows in zip(firsts, own, strict=True)]
    inputs = drawn(runs.rows)
    grad = torch.randn(runs.rows, SIZES.heads, SIZES.values, generator=torch.Generator().manual_seed(1))
    exact = SpaceInputs(*(x.double().requires_grad_() for x in inputs))
    expected = torch.zeros_like(grad, dtype=torch.float64)
    for rows in sequences:  # a shared row has the same result in every sequence
        expected = expected.index_copy(0, rows, by_transformers(exact.at(rows), SIZES))
    gradients = torch.autograd.grad(expected, exact, grad.double())
    for rule in (apply_rule, SpaceInputs.by_chunks):
        leaves = SpaceInputs(*(x.clone().requires_grad_() for x in inputs))
        found = rule(leaves, SIZES, runs)
        assert relative(found.detach(), expected.detach()) <= 2e-6
        for name, one, other in zip(
            SpaceInputs._fields, torch.autograd.grad(found, leaves, grad), gradients, strict=True
        ):
            assert relative(one, other) <= 1e-5, (rule.__name__, name)


def test_the_recurrence_is_that_of_transformers():
    """Its scan by chunks, which works in fp32."""
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    groups, heads, keys, values, min_step = SIZES
    rows = 150
    inputs = drawn(rows)
    mixed = functional.conv1d(inputs.x.t()[None], inputs.weight, inputs.bias, padding=TAPS - 1, groups=SIZES.channels)
    x, b, c = functional.silu(mixed[0, :, :rows]).t()[None].split((heads * values, groups * keys, groups * keys), -1)
    expected = mamba2_chunk_scan(
        x.unflatten(-1, (heads, values)), inputs.steps[None], -inputs.decay_logs.exp(), b.unflatten(-1, (groups, keys)),
        c.unflatten(-1, (groups, keys)), chunk_size=64, D=inputs.skips, dt_bias=inputs.biases, dt_softplus=True,
        dt_limit=(min_step, float("inf")),
    )  # fmt: skip
    found = apply_rule(inputs, SIZES, Runs(torch.tensor([[0, rows, NONE, NONE]]), 0, TAPS), empty_states(1))
    assert relative(found, expected[0].double()) <= 2e-6


def empty_states(count: int, sizes: SpaceSizes = SIZES) -> States:
    """Whose contents show where they are read."""
    return States(*(torch.full(shape, float("nan")) for shape in States.shapes(count, TAPS, sizes)))


def of_table(inputs: SpaceInputs, table, states: States, sizes: SpaceSizes = SIZES) -> Tensor:
    return apply_rule(inputs, sizes, Runs(torch.tensor(table), 0, TAPS), states)


def test_a_token_has_the_same_bits_under_any_cut():
    """One run, two, one token a call, beside others, after a copied state, and with gradients."""
    inputs = drawn(41)
    whole = of_table(inputs, [[0, 41, NONE, 0]], empty_states(1))
    states = empty_states(3)
    parts = [of_table(inputs.at(torch.arange(17)), [[0, 17, NONE, 2]], states)]
    parts.append(of_table(inputs.at(torch.arange(17, 41)), [[0, 0, 2, 1], [0, 24, 1, 1]], states))
    assert torch.equal(torch.cat(parts), whole)
    states = empty_states(2)
    single = [of_table(inputs.at(torch.tensor([i])), [[0, 1, NONE if i == 0 else 1, 1]], states) for i in range(41)]
    assert torch.equal(torch.cat(single), whole)
    other = drawn(12, seed=3)
    joined = inputs._replace(x=torch.cat([other.x, inputs.x]), steps=torch.cat([other.steps, inputs.steps]))
    beside = of_table(joined, [[12, 41, NONE, 0], [0, 12, NONE, NONE]], empty_states(1))
    assert torch.equal(beside[12:], whole)
    leaves = SpaceInputs(*(x.clone().requires_grad_() for x in inputs))
    trained = apply_rule(leaves, SIZES, Runs(torch.tensor([[0, 41, NONE, NONE]]), 0, TAPS))
    assert torch.equal(trained.detach(), whole)


@pytest.mark.parametrize("sizes", [SIZES, SpaceSizes(1, 2, 5, 16), SpaceSizes(4, 8, 128, 64), SpaceSizes(2, 6, 16, 80)])
def test_a_token_has_the_same_bits_with_any_number_of_threads(sizes):
    inputs, before, found = drawn(300, sizes), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(of_table(inputs, [[0, 200, NONE, 0], [200, 100, NONE, NONE]], empty_states(1, sizes), sizes))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found) and found[0].isfinite().all()


def test_what_a_device_computes_keeps_the_same_states():
    """What a device computes: prefills, a copy, decode steps with padding, and a prompt in two parts."""
    kept, own = empty_states(3), empty_states(3)
    passes = [
        [[0, 70, NONE, 0], [70, 9, NONE, 2], [0, 0, 0, 1], [79, 2, NONE, NONE]],
        [[0, 1, 0, 0], [1, 1, 1, 1], [2, 1, 2, 2], [3, 1, NONE, NONE]],
        [[0, 1, 1, 1], [1, 66, 2, 2], [67, 1, NONE, 0]],
        [[0, 0, 2, 1], [0, 3, 1, 1]],
    ]
    for number, table in enumerate(passes):
        runs = Runs(torch.tensor(table), 0, TAPS)
        inputs = drawn(runs.rows, seed=number)
        assert (runs.decodes is not None) == (number == 1)
        rule, rows = (SpaceInputs.by_chunks, runs) if runs.decodes is None else (SpaceInputs.one_token, runs.decodes)
        found = rule(inputs, SIZES, rows, own)
        expected = apply_rule(inputs, SIZES, runs, kept)
        counted = [row for first, rows, _, after in table if after != NONE for row in range(first, first + rows)]
        assert relative(found[counted], expected[counted]) <= 1e-5
        assert torch.equal(own.inputs, kept.inputs)
        assert relative(own.memories, kept.memories) <= 1e-5
