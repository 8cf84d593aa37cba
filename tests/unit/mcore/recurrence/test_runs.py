"""Which rows continue which state: the runs of a packed stream, those of decode steps, and wrong ones. Where runs leave
states; what a device computes leaves the same ones. A token has the same bits under any cut of its sequence, with any
number of threads."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.mcore import device, recurrence
from megarl.mcore.kernels import native
from megarl.mcore.recurrence import apply_rule
from megarl.mcore.recurrence import runs as runs_module
from megarl.mcore.recurrence.delta_rule import HeadSizes
from megarl.mcore.recurrence.runs import NONE, Runs
from megarl.mcore.recurrence.state_space import SpaceSizes
from tests.cuda_walk.cost.work import work_of
from tests.helpers.models.recurrent_inputs import (
    BOUNDED,
    CHANNELS,
    DELTA,
    SPACE,
    TAPS,
    drawn,
    empty_states,
    leaves,
    of_table,
    relative,
    runs_of,
)

SIZES = [
    *(CHANNELS, BOUNDED._replace(keys=5, decays=5)),
    *(DELTA, HeadSizes(1, 2, 5, 16), HeadSizes(4, 4, 128, 128), HeadSizes(2, 6, 16, 80)),
    *(SPACE, SpaceSizes(1, 2, 5, 16), SpaceSizes(4, 8, 128, 64), SpaceSizes(2, 6, 16, 80)),
]
needs_kernels = pytest.mark.skipif(not native.is_built(), reason=native.absence())


def test_runs_of_a_stream():
    assert runs_of([3, 2], padding=0).table.tolist() == [[0, 3, NONE, NONE], [3, 2, NONE, NONE]]
    runs = runs_of([5, 4, 3, 4], [0, 0, 2, 0], [0, 3, 0, 2], padding=1)
    assert runs.table.tolist() == [
        [0, 2, NONE, 0], [2, 1, 0, 1],  # prefixes of the first sequence: two tokens, three tokens
        [3, 2, 1, NONE], [5, 1, 1, NONE], [6, 3, NONE, NONE], [9, 2, 0, NONE], [11, 1, NONE, NONE],
    ]  # fmt: skip
    assert runs.states == 2 and runs.rows == 12


def test_only_steps_of_single_rows_that_stay_in_their_states_are_decodes():
    steps = {
        "decode": [[0, 1, 2, 2], [1, 1, 0, 0], [2, 1, NONE, NONE]], "padding": [[0, 1, NONE, NONE]],
        "two rows": [[0, 2, 1, 1]], "a copy": [[0, 1, 1, 1], [0, 0, 1, 2]], "a beginning": [[0, 1, NONE, 1]],
    }  # fmt: skip
    found = {name: Runs(torch.tensor(table), 0, 4).decodes for name, table in steps.items()}
    assert found.pop("decode").tolist() == [2, 0, NONE] and set(found.values()) == {None}


@needs_kernels
@pytest.mark.parametrize(
    "table", [[[0, 11, NONE, 0]], [[0, 10, NONE, 1]], [[0, 10, 1, 0]], [[-1, 2, NONE, 0]]], ids=str
)
def test_runs_of_rows_or_states_that_are_not_there_are_refused(table):
    with pytest.raises(RuntimeError, match="a run of rows or states that are not there"):
        of_table(drawn(10, DELTA), DELTA, table, empty_states(1, DELTA))


@needs_kernels
def test_states_are_left_where_a_run_says():
    inputs, states = drawn(10, DELTA), empty_states(4, DELTA)
    of_table(inputs, DELTA, [[0, 6, NONE, 3], [6, 4, NONE, NONE], [0, 0, 3, 1]], states)
    assert states.inputs[0].isnan().all() and states.memories[2].isnan().all()
    assert torch.equal(states.inputs[3], inputs.x[3:6]) and torch.equal(states.memories[3], states.memories[1])
    of_table(inputs.at(torch.tensor([6])), DELTA, [[0, 1, 3, 3]], states)
    assert torch.equal(states.inputs[3], inputs.x[4:7]) and not torch.equal(states.memories[3], states.memories[1])
    short = empty_states(1, DELTA)
    of_table(inputs.at(torch.arange(2)), DELTA, [[0, 2, NONE, 0]], short)
    assert torch.equal(short.inputs[0], torch.cat([torch.zeros(1, DELTA.channels), inputs.x[:2]]))


@needs_kernels
@pytest.mark.parametrize("by_triton", [False, pytest.param(True, marks=pytest.mark.long)], ids=["operators", "kernels"])
@pytest.mark.parametrize("sizes", [DELTA, SPACE], ids=["delta rule", "state space"])
def test_what_a_device_computes_keeps_the_same_states(sizes, by_triton, monkeypatch):
    """What a device computes: prefills, a copy, decode steps with padding, a prompt in two parts, and prompts whose
    states at ends of blocks are kept; one of them continues another's, and ends there."""
    if by_triton:
        interpret(monkeypatch)
    kept, own = empty_states(5, sizes), empty_states(5, sizes)
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
        inputs = drawn(runs.rows, sizes, seed=number)
        assert (runs.decodes is not None) == (number in (1, 2))
        if runs.decodes is None:
            found = inputs.by_chunks(sizes, runs, own)
        else:
            found = inputs.one_token(sizes, runs.decodes, own)
        expected = apply_rule(inputs, sizes, runs, kept)
        counted = [row for first, rows, _, after in table if after != NONE for row in range(first, first + rows)]
        assert relative(found[counted], expected[counted]) <= 1e-5
        written = [state for state in range(5) if not kept.memories[state].isnan().any()]
        assert written == list(range(5 if number > 4 else 3)) and torch.equal(own.inputs[written], kept.inputs[written])
        assert relative(own.memories[written], kept.memories[written]) <= 1e-5


@needs_kernels
@pytest.mark.parametrize(
    "sizes", [DELTA, CHANNELS, BOUNDED, SPACE], ids=["heads", "channels", "bounded", "state space"]
)
def test_a_token_has_the_same_bits_under_any_cut(sizes):
    """One run, two, one token a call, beside others, after a copied state, and with gradients."""
    inputs = drawn(41, sizes)
    whole = of_table(inputs, sizes, [[0, 41, NONE, 0]], empty_states(1, sizes))
    states = empty_states(3, sizes)
    parts = [of_table(inputs.at(torch.arange(17)), sizes, [[0, 17, NONE, 2]], states)]
    parts.append(of_table(inputs.at(torch.arange(17, 41)), sizes, [[0, 0, 2, 1], [0, 24, 1, 1]], states))
    assert torch.equal(torch.cat(parts), whole)
    states = empty_states(2, sizes)
    single = [
        of_table(inputs.at(torch.tensor([i])), sizes, [[0, 1, NONE if i == 0 else 1, 1]], states) for i in range(41)
    ]
    assert torch.equal(torch.cat(single), whole)
    other, of_rows = drawn(12, sizes, seed=3), [name for name, x in inputs._asdict().items() if len(x) == 41]
    joined = inputs._replace(**{name: torch.cat([getattr(other, name), getattr(inputs, name)]) for name in of_rows})
    beside = of_table(joined, sizes, [[12, 41, NONE, 0], [0, 12, NONE, NONE]], empty_states(1, sizes))
    assert len(of_rows) in (2, 3) and torch.equal(beside[12:], whole)
    trained = apply_rule(leaves(inputs), sizes, runs_of([41], padding=0))
    assert torch.equal(trained.detach(), whole)


@needs_kernels
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_token_has_the_same_bits_with_any_number_of_threads(sizes):
    inputs, before, found = drawn(300, sizes), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            table = [[0, 200, NONE, 0], [200, 100, NONE, NONE]]
            found.append(of_table(inputs, sizes, table, empty_states(1, sizes)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found) and found[0].isfinite().all()


def interpret(monkeypatch):
    """Has chunks computed by Triton's interpreter."""
    pytest.importorskip("triton")
    monkeypatch.setattr(runs_module, "has_triton", lambda _: True)


@pytest.mark.parametrize(
    "sizes",
    [DELTA, *(pytest.param(each, marks=pytest.mark.long) for each in (BOUNDED._replace(values=16), SPACE))],
    ids=["heads", "channels", "state space"],
)
def test_kernels_of_a_device_have_the_values_and_gradients_of_its_operators(sizes, monkeypatch):
    """Of prefixes of two lengths, the longer of two chunks; in float64 the operators are those of transformers."""
    runs = runs_of((70, 8, 75, 9), (0, 0, 0, 3), (0, 5, 66, 0))
    inputs, found = drawn(runs.rows, sizes), []
    for dtype in (torch.float64, torch.float32):
        own = leaves(inputs, dtype)
        read = own.by_chunks(sizes, runs)
        grad = torch.linspace(-1, 1, read.numel(), dtype=dtype).view_as(read).sin()
        found.append([read.detach(), *torch.autograd.grad(read, own, grad)])
        interpret(monkeypatch)
    for expected, one in zip(*found, strict=True):
        assert expected.abs().max() > 0 and relative(one, expected) <= 2e-5


# Kernels of a layer's convolution, gates and rule on CUDA: forwards; and backwards, where forwards are computed again.
CEILINGS = {"heads": (DELTA, 29, 107), "channels": (CHANNELS, 98, 346), "state space": (SPACE, 27, 98)}


class LaunchCount(TorchDispatchMode):
    """Counts kernels of a device, as the walks of `tests.cuda_walk` do."""

    launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        work = work_of(func, args, kwargs or {}, result, 1, 1)
        self.launches += 0 if work is None else work.kernels
        return result


@pytest.mark.parametrize("kind", CEILINGS)
def test_a_layer_on_a_device_has_few_launches_at_any_length(kind, monkeypatch):
    """And two more walks, forwards and backwards, where sequences share a prefix. Tensors have no numbers."""
    pytest.importorskip("triton")
    monkeypatch.setattr(runs_module, "has_triton", lambda _: True)
    monkeypatch.setattr(recurrence, "has_kernels", lambda _: False)
    monkeypatch.setattr(device, "to_device", lambda arrays: [torch.from_numpy(each).to("meta") for each in arrays])
    (sizes, *ceilings), found = CEILINGS[kind], {}
    for lengths, prefixes in ((50,), None), ((1500, 548), None), ((1500, 1400), (0, 1000)):
        runs = runs_of(lengths, prefixes and (0, 0), prefixes, padding=0)
        assert runs.convolution.read.is_meta and len(runs.chunks.forwards) == (2 if prefixes else 1) and runs.readers
        inputs = type(drawn(1, sizes))(*(x.to("meta").requires_grad_() for x in drawn(runs.rows, sizes)))
        with LaunchCount() as forwards:
            read = apply_rule(inputs, sizes, runs)
        with LaunchCount() as backwards:
            torch.autograd.grad(read, inputs, torch.empty_like(read))
        found[lengths] = forwards.launches, backwards.launches
    short, long, shared = found.values()
    assert short == long and all(0.8 * most < count <= most for count, most in zip(short, ceilings, strict=True))
    assert shared == (short[0] + 1, short[1] + 2)
