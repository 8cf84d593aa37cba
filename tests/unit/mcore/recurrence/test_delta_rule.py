"""The gated delta rule against transformers' code in float64, and the bits of a token under any cut of its sequence."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megarl.batch import SharedPrefix
from megarl.mcore.attention.segments import TokenStream
from megarl.mcore.kernels import native
from megarl.mcore.recurrence.delta_rule import HeadSizes, Inputs
from megarl.mcore.recurrence.rule import apply_rule
from megarl.mcore.recurrence.runs import NONE, Runs, runs_of_stream
from megarl.mcore.recurrence.states import States

SIZES, TAPS = HeadSizes(groups=2, heads=4, keys=24, values=32), 4
LENGTHS = (150, 67, 5, 9, 70, 1, 2, 23)
# Sequences 1 and 4 continue 66 tokens of the first one, and sequence 3 four of sequence 2.
HOLDERS, PREFIXES = (0, 0, 2, 2, 0, 5, 6, 7), (0, 66, 0, 4, 66, 0, 0, 0)

pytestmark = pytest.mark.skipif(not native.is_built(), reason=native.absence())


def drawn(rows: int, sizes: HeadSizes = SIZES, taps: int = TAPS, seed: int = 0) -> Inputs:
    """Inputs with decays between almost 0 and almost 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    return Inputs(
        x=normal(rows, sizes.channels), a=normal(rows, sizes.heads), b=normal(rows, sizes.heads),
        weight=normal(sizes.channels, 1, taps), decay_logs=2 * normal(sizes.heads), biases=2 * normal(sizes.heads) - 2,
    )  # fmt: skip


def runs_of(lengths, holders=None, prefixes=None, padding: int = 3) -> Runs:
    shared = None if holders is None else SharedPrefix(torch.tensor(holders), torch.tensor(prefixes))
    return runs_of_stream(*TokenStream.of(np.array(lengths), shared, lambda tokens: tokens + padding), TAPS)


def by_transformers(inputs: Inputs, sizes: HeadSizes) -> Tensor:
    """[T, H, V] of one sequence: the layer's code of Qwen3-Next between its projections and its norm."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    groups, heads, keys, values = sizes[:4]
    channels, taps = inputs.weight.shape[0], inputs.weight.shape[2]
    mixed = functional.conv1d(inputs.x.t()[None], inputs.weight, padding=taps - 1, groups=channels)[
        ..., : len(inputs.x)
    ]
    query, key, value = functional.silu(mixed)[0].t()[None].split((groups * keys, groups * keys, heads * values), -1)
    query, key = (part.unflatten(-1, (groups, keys)).repeat_interleave(heads // groups, 2) for part in (query, key))
    log_decays = -inputs.decay_logs.exp() * functional.softplus(inputs.a + inputs.biases)
    found, _ = torch_recurrent_gated_delta_rule(
        query, key, value.unflatten(-1, (heads, values)), log_decays[None], inputs.b.sigmoid()[None],
        initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return found[0]


def rows_of(inputs: Inputs, rows: Tensor) -> Inputs:
    return inputs._replace(x=inputs.x[rows], a=inputs.a[rows], b=inputs.b[rows])


def stream_of_sequences(lengths, holders, prefixes) -> list[Tensor]:
    """The rows of each sequence's tokens in the stream, shared ones included; the padding last."""
    stream = TokenStream.of(
        np.array(lengths), SharedPrefix(torch.tensor(holders), torch.tensor(prefixes)), lambda tokens: tokens + 3
    )
    own = [torch.arange(start, end) for start, end in zip(stream.starts, stream.ends, strict=True)]
    firsts = zip(stream.holders.tolist(), stream.prefix_lengths.tolist(), strict=True)
    return [torch.cat([own[holder][:length], rows]) for (holder, length), rows in zip(firsts, own, strict=True)]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("holders, prefixes", [(range(8), (0,) * 8), (HOLDERS, PREFIXES)], ids=["alone", "shared"])
def test_results_and_gradients_are_those_of_transformers(holders, prefixes):
    runs = runs_of(LENGTHS, list(holders), list(prefixes))
    inputs = drawn(runs.rows)
    sequences = stream_of_sequences(LENGTHS, list(holders), list(prefixes))
    grad = torch.randn(runs.rows, SIZES.heads, SIZES.values, generator=torch.Generator().manual_seed(1))

    exact = Inputs(*(x.double().requires_grad_() for x in inputs))
    expected = torch.zeros_like(grad, dtype=torch.float64)
    for rows in sequences:  # a shared row has the same result in every sequence
        expected = expected.index_copy(0, rows, by_transformers(rows_of(exact, rows), SIZES))
    exact_gradients = torch.autograd.grad(expected, exact, grad.double())

    wide = Inputs(*(x.double().requires_grad_() for x in inputs))
    precise = wide.by_chunks(SIZES, runs)
    gradients = torch.autograd.grad(precise, wide, grad.double())
    assert relative(precise.detach(), expected.detach()) <= 2e-6  # transformers computes in fp32
    for name, one, other in zip(Inputs._fields, gradients, exact_gradients, strict=True):
        assert relative(one, other) <= 2e-5, name
    for rule in (apply_rule, Inputs.by_chunks):
        own = Inputs(*(x.clone().requires_grad_() for x in inputs))
        found = rule(own, SIZES, runs)
        assert relative(found.detach(), precise.detach()) <= (1e-6 if rule is apply_rule else 1e-5)
        for name, one, other in zip(Inputs._fields, torch.autograd.grad(found, own, grad), gradients, strict=True):
            assert relative(one, other) <= 5e-5, (rule.__name__, name)


def empty_states(count: int, sizes: HeadSizes = SIZES) -> States:
    """Whose contents show where they are read."""
    return States(*(torch.full(shape, float("nan")) for shape in States.shapes(count, TAPS, sizes)))


def of_table(inputs: Inputs, table, states: States, sizes: HeadSizes = SIZES) -> Tensor:
    return apply_rule(inputs, sizes, Runs(torch.tensor(table), 0, TAPS), states)


def test_a_token_has_the_same_bits_under_any_cut():
    """One run, two, one token a call, beside others, after a copied state, and with gradients."""
    inputs, rows = drawn(41), torch.arange(40)
    whole = of_table(inputs, [[0, 41, NONE, 0]], empty_states(1))
    states = empty_states(3)
    parts = [of_table(rows_of(inputs, torch.arange(17)), [[0, 17, NONE, 2]], states)]
    parts.append(of_table(rows_of(inputs, torch.arange(17, 41)), [[0, 0, 2, 1], [0, 24, 1, 1]], states))
    assert torch.equal(torch.cat(parts), whole)
    states = empty_states(2)
    single = [
        of_table(rows_of(inputs, torch.tensor([i])), [[0, 1, NONE if i == 0 else 1, 1]], states) for i in range(41)
    ]
    assert torch.equal(torch.cat(single), whole)
    other = drawn(12, seed=3)
    joined = Inputs(*(torch.cat(pair) for pair in zip(other[:3], rows_of(inputs, rows)[:3], strict=True)), *inputs[3:])
    beside = of_table(joined, [[12, 40, NONE, 0], [0, 12, NONE, NONE]], empty_states(1))
    assert torch.equal(beside[12:], whole[:40])
    trained = apply_rule(Inputs(*(x.requires_grad_() for x in inputs)), SIZES, runs_of([41], padding=0))
    assert torch.equal(trained.detach(), whole)


@pytest.mark.parametrize("sizes", [SIZES, HeadSizes(1, 2, 5, 16), HeadSizes(4, 4, 128, 128), HeadSizes(2, 6, 16, 80)])
def test_a_token_has_the_same_bits_with_any_number_of_threads(sizes):
    inputs, before = drawn(300, sizes), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(of_table(inputs, [[0, 200, NONE, 0], [200, 100, NONE, NONE]], empty_states(1, sizes), sizes))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found) and found[0].isfinite().all()


def test_states_are_left_where_a_run_says():
    inputs, states = drawn(10), empty_states(4)
    of_table(inputs, [[0, 6, NONE, 3], [6, 4, NONE, NONE], [0, 0, 3, 1]], states)
    assert states.inputs[0].isnan().all() and states.memories[2].isnan().all()
    assert torch.equal(states.inputs[3], inputs.x[3:6]) and torch.equal(states.memories[3], states.memories[1])
    of_table(rows_of(inputs, torch.tensor([6])), [[0, 1, 3, 3]], states)
    assert torch.equal(states.inputs[3], inputs.x[4:7]) and not torch.equal(states.memories[3], states.memories[1])
    short = empty_states(1)
    of_table(rows_of(inputs, torch.arange(2)), [[0, 2, NONE, 0]], short)
    assert torch.equal(short.inputs[0], torch.cat([torch.zeros(1, SIZES.channels), inputs.x[:2]]))


@pytest.mark.parametrize(
    "table", [[[0, 11, NONE, 0]], [[0, 10, NONE, 1]], [[0, 10, 1, 0]], [[-1, 2, NONE, 0]]], ids=str
)
def test_runs_of_rows_or_states_that_are_not_there_are_refused(table):
    with pytest.raises(RuntimeError, match="a run of rows or states that are not there"):
        of_table(drawn(10), table, empty_states(1))


def test_runs_of_a_stream():
    assert runs_of([3, 2], padding=0).table.tolist() == [[0, 3, NONE, NONE], [3, 2, NONE, NONE]]
    runs = runs_of([5, 4, 3, 4], [0, 0, 2, 0], [0, 3, 0, 2], padding=1)
    assert runs.table.tolist() == [
        [0, 2, NONE, 0], [2, 1, 0, 1],  # prefixes of the first sequence: two tokens, three tokens
        [3, 2, 1, NONE], [5, 1, 1, NONE], [6, 3, NONE, NONE], [9, 2, 0, NONE], [11, 1, NONE, NONE],
    ]  # fmt: skip
    assert runs.states == 2 and runs.rows == 12


def test_what_a_device_computes_keeps_the_same_states():
    """What a device computes: prefills, a copy, decode steps with padding, a prompt in two parts, and prompts whose
    states at ends of blocks are kept; one of them continues another's, and ends there."""
    kept, own = empty_states(5), empty_states(5)
    passes = [
        [[0, 70, NONE, 0], [70, 9, NONE, 2], [0, 0, 0, 1], [79, 2, NONE, NONE]],
        [[0, 1, 0, 0], [1, 1, 1, 1], [2, 1, 2, 2], [3, 1, NONE, NONE]],
        [[0, 1, 2, 2], [1, 1, 0, 0]],
        [[0, 1, 1, 1], [1, 66, 2, 2], [67, 1, NONE, 0]],
        [[0, 0, 2, 1], [0, 3, 1, 1]],
        [[0, 64, NONE, 3], [64, 6, 3, 0], [70, 64, 2, 4], [134, 0, 4, 1]],
        [[0, 6, 3, 2], [6, 1, 4, 0], [7, 1, NONE, NONE]],
    ]
    for number, table in enumerate(passes):
        runs = Runs(torch.tensor(table), 0, TAPS)
        inputs = drawn(runs.rows, seed=number)
        assert (runs.decodes is not None) == (number in (1, 2))
        rule, rows = (Inputs.by_chunks, runs) if runs.decodes is None else (Inputs.one_token, runs.decodes)
        found = rule(inputs, SIZES, rows, own)
        expected = apply_rule(inputs, SIZES, runs, kept)
        counted = [row for first, rows, _, after in table if after != NONE for row in range(first, first + rows)]
        assert relative(found[counted], expected[counted]) <= 1e-5
        written = [state for state in range(5) if not kept.memories[state].isnan().any()]
        assert written == list(range(5 if number > 4 else 3)) and torch.equal(own.inputs[written], kept.inputs[written])
        assert relative(own.memories[written], kept.memories[written]) <= 1e-5
