"""The gated delta rule with kernels of flash-linear-attention: which of them get what, and their results and gradients
by Triton's interpreter.

The package is not in the environment of the tests. Without it a function of PyTorch's operators stands for the kernels,
of which it has the arguments.
"""

import functools
import itertools
import sys
import types

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megarl.mcore.recurrence import fused_chunks
from megarl.mcore.recurrence.delta_rule import EPSILON, HeadSizes, Inputs
from megarl.mcore.recurrence.runs import CHUNK, NONE, Runs, States
from tests.helpers.models import interpreted_kernels
from tests.helpers.models.recurrent_inputs import TAPS, drawn, empty_states, leaves, relative

# Numbers above the diagonal, which kernels leave out after they have computed them.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
SIZES = [(2, 4, 24, 40), (1, 2, 128, 128)]  # groups, heads, keys, values
# Largest errors, as parts of the largest number: of results, of gradients, and of those of decays, which the kernels
# get as differences of sums over a chunk.
LIMITS = {torch.float32: (5e-5, 5e-5, 5e-4), torch.bfloat16: (0.01, 0.02, 0.06)}
OF_DECAYS = ("a", "decay_logs", "biases")
STREAMS = {  # runs of training
    "packed": [[0, 64, NONE, NONE], [64, 65, NONE, NONE], [129, 1, NONE, NONE], [130, 3, NONE, NONE]],
    "shared prefix": [[0, 66, NONE, 0], [66, 4, 0, NONE], [70, 3, NONE, 1], [73, 65, 0, NONE], [138, 2, 1, NONE],
                      [140, 2, NONE, NONE]],
}  # fmt: skip
PREFILLS = [  # steps of a rollout: prompts, copies, parts of prompts, padding
    [[0, 70, NONE, 0], [70, 9, NONE, 2], [0, 0, 0, 1], [79, 2, NONE, NONE]],
    [[0, 64, 2, 3], [64, 6, 3, 2], [70, 1, 1, 1]],
    [[0, 0, 2, 1], [0, 3, 1, 1], [3, 5, 0, NONE]],
]


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor | None, output_final_state: bool,
    use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor, chunk_indices: Tensor,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The package's function, token by token, which also checks the chunks."""
    ends, each = cu_seqlens.tolist(), v.shape[2] // k.shape[2]
    counts = [-(-(end - start) // CHUNK) for start, end in itertools.pairwise(ends)]
    assert chunk_indices.tolist() == [[run, chunk] for run, count in enumerate(counts) for chunk in range(count)]
    assert use_qk_l2norm_in_kernel and ends[0] == 0 and ends[-1] == q.shape[1]
    q, k = (x[0].float() * torch.rsqrt(x[0].float().square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    q, k = q.repeat_interleave(each, 1) * k.shape[-1] ** -0.5, k.repeat_interleave(each, 1)
    found, final = [], []
    for run, (start, end) in enumerate(itertools.pairwise(ends)):
        state = q.new_zeros(*k.shape[1:], v.shape[-1]) if initial_state is None else initial_state[run]
        for row in range(start, end):
            state = state * g[0, row].exp()[:, None, None]
            change = (v[0, row].float() - (k[row].unsqueeze(-1) * state).sum(1)) * beta[0, row].unsqueeze(-1)
            state = state + k[row].unsqueeze(-1) * change.unsqueeze(1)
            found.append((q[row].unsqueeze(-1) * state).sum(1))
        final.append(state)
    return torch.stack(found)[None].to(v.dtype), torch.stack(final) if output_final_state else None


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    *,
    initial_state: Tensor | None,
    activation: str,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> tuple[Tensor, None]:
    """The package's function, which also checks that a state has a row more than is read."""
    ends, found = cu_seqlens.tolist(), []
    assert activation == "silu" and ends[-1] == x.shape[1] and chunk_indices[-1, 0] == len(ends) - 2
    for run, (start, end) in enumerate(itertools.pairwise(ends)):
        before = x.new_zeros(weight.shape) if initial_state is None else initial_state[run]
        whole = torch.cat([before[:, 1:], x[0, start:end].float().t()], 1)
        found.append(functional.conv1d(whole[None], weight.unsqueeze(1), groups=len(weight))[0].t())
    return functional.silu(torch.cat(found))[None].to(x.dtype), None


@pytest.fixture(params=["reference", pytest.param("fla", marks=pytest.mark.nightly)])
def kernels(request, monkeypatch) -> str:
    """Whose kernels compute."""
    if request.param == "reference":
        for name, function in (
            ("ops.gated_delta_rule", chunk_gated_delta_rule), ("modules.causal_conv1d", causal_conv1d)
        ):  # fmt: skip
            package = types.ModuleType(f"fla.{name}")
            monkeypatch.setattr(package, function.__name__, function, raising=False)
            monkeypatch.setitem(sys.modules, package.__name__, package)
    elif fused_chunks.version() is None:
        pytest.skip("fla-core is not installed: pip install 'megarl[recurrent]'")
    else:
        interpreted_kernels.interpret_package(functools.partial(monkeypatch.setattr, raising=False), "fla")
    return request.param


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("shape, kind", [
    (SIZES[0], torch.float32),
    pytest.param(SIZES[1], torch.float32, marks=pytest.mark.nightly),
    pytest.param(SIZES[1], torch.bfloat16, marks=pytest.mark.nightly),
])  # fmt: skip
def test_results_and_gradients_are_those_of_float64(kernels, shape, kind, stream):
    """In bf16, as a device computes them, and in fp32, which the interpreter multiplies as it is."""
    sizes, runs = HeadSizes(*shape), Runs(torch.tensor(STREAMS[stream]), 2, TAPS)
    inputs = drawn(runs.rows, sizes)
    exact, own = leaves(inputs, torch.float64), leaves(inputs)
    grad = torch.randn(runs.rows, sizes.heads, sizes.values, generator=torch.Generator().manual_seed(1))
    expected = exact.by_chunks(sizes, runs)
    of_exact = torch.autograd.grad(expected, exact, grad.double())
    found = own.by_chunks(sizes._replace(fused_type=kind), runs)
    assert found.dtype == kind and relative(found.detach(), expected.detach()) <= LIMITS[kind][0]
    for name, one, other in zip(Inputs._fields, torch.autograd.grad(found, own, grad.to(kind)), of_exact, strict=True):
        assert relative(one, other) <= LIMITS[kind][2 if name in OF_DECAYS else 1], name


def test_states_are_those_of_pytorchs_operators(kernels):
    sizes = HeadSizes(*SIZES[0])
    fused = sizes._replace(fused_type=torch.float32)
    own, expected = empty_states(4, sizes), empty_states(4, sizes)
    for number, table in enumerate(PREFILLS):
        runs = Runs(torch.tensor(table), 0, TAPS)
        inputs = drawn(runs.rows, sizes, seed=10 * number)
        with torch.no_grad():
            found, wanted = inputs.by_chunks(fused, runs, own), inputs.by_chunks(sizes, runs, expected)
        assert relative(found, wanted) <= 2e-5
        written = [state for state in range(4) if not expected.memories[state].isnan().any()]
        assert [state for state in range(4) if not own.memories[state].isnan().any()] == written
        assert torch.equal(own.inputs[written], expected.inputs[written])
        assert relative(own.memories[written], expected.memories[written]) <= 2e-5
    assert written == [0, 1, 2, 3]


def test_a_prompt_that_is_cut_at_a_chunk_has_the_bits_of_the_whole_one(kernels):
    sizes = HeadSizes(*SIZES[0], torch.float32)
    states = States(*(torch.zeros(shape) for shape in States.shapes(1, TAPS, sizes)))
    inputs = drawn(100, sizes)
    compute = functools.partial(Inputs.by_chunks, sizes=sizes, states=states)
    with torch.no_grad():
        whole = compute(inputs, runs=Runs(torch.tensor([[0, 100, NONE, 0]]), 0, TAPS))
        memory = states.memories.clone()
        first = compute(inputs.at(torch.arange(CHUNK)), runs=Runs(torch.tensor([[0, CHUNK, NONE, 0]]), 0, TAPS))
        rest = Runs(torch.tensor([[0, 100 - CHUNK, 0, 0]]), 0, TAPS)
        second = compute(inputs.at(torch.arange(CHUNK, 100)), runs=rest)
    assert torch.equal(torch.cat([first, second]), whole) and torch.equal(states.memories, memory)


def test_runs_are_packed_by_what_they_continue():
    (level,), order = Runs(torch.tensor(STREAMS["packed"]), 0, TAPS).packed
    assert level.rows is None and order is None and level.cu_rows.tolist() == [0, 64, 129, 130, 133]
    assert level.chunks.tolist() == [[0, 0], [1, 0], [1, 1], [2, 0], [3, 0]]
    (first, second), order = Runs(torch.tensor(STREAMS["shared prefix"]), 2, TAPS).packed
    assert torch.equal(torch.cat([first.rows, second.rows])[order], torch.arange(142))
    assert second.before == [0, 0, 1] and first.after == [0, 1, NONE] and second.cu_rows.tolist() == [0, 4, 69, 71]
    (prompts, copies), order = Runs(torch.tensor(PREFILLS[0]), 0, TAPS).packed
    assert prompts.rows is None and order is None and len(copies.chunks) == 0 and copies.after == [1]
