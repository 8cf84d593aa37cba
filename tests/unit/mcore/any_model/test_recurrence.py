"""Recurrences of modules of transformers: values and gradients of their own functions, over runs of a pass."""

import importlib
import types

import pytest
import torch
from torch.nn import functional

from megarl.mcore import recurrence as rules
from megarl.mcore.any_model import attention, recurrence
from megarl.mcore.any_model.attention import FirstPass, PackedPass, Unsupported
from megarl.mcore.kernels import native
from megarl.mcore.recurrence.runs import NONE, Runs

LENGTHS, ROWS = (20, 1, 9), 32  # of sequences; of the pass, which are more
TOKENS = sum(LENGTHS)
STARTS = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
RUNS = Runs(torch.tensor([(at, rows, NONE, NONE) for at, rows in zip(STARTS, LENGTHS, strict=True)]), 0, 4)
HEADS, GROUPS, KEYS, VALUES = 4, 2, 8, 24  # values are no whole vectors


def numbers(*shape: int, scale: float = 1.0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))).requires_grad_()


def convolution(activation, taps=4):
    return "causal_conv1d_fn", "lfm2", (numbers(1, 40, ROWS), numbers(40, taps), numbers(40), activation), {}, 2


def space(**others):
    rows = numbers(1, ROWS, HEADS, VALUES), numbers(1, ROWS, HEADS), -numbers(HEADS).exp()
    vectors = (numbers(1, ROWS, GROUPS, KEYS) for _ in range(2))
    given = dict(chunk_size=8, D=numbers(HEADS), dt_bias=numbers(HEADS), dt_softplus=True)
    return "mamba2_chunk_scan", "bamba", (*rows, *vectors), given | others, 1


def delta():
    rows = *(numbers(1, ROWS, GROUPS, KEYS) for _ in range(2)), numbers(1, ROWS, HEADS, VALUES)
    given = dict(g=-numbers(1, ROWS, HEADS).exp(), beta=numbers(1, ROWS, HEADS).sigmoid(), use_qk_l2norm_in_kernel=True)
    return "torch_chunk_gated_delta_rule", "qwen3_next", rows, given, 1


CASES = {
    "convolution": convolution("silu"), "short convolution": convolution(None, 3), "space": space(),
    "limited steps": space(dt_limit=(0.3, 1.2)), "delta rule": delta(),
}  # fmt: skip


def first(result):
    return result[0] if isinstance(result, tuple) else result


def of_sequences(function, args, given, axis):
    """What transformers' function returns, sequence by sequence."""

    def at(x, each):
        is_of_rows = torch.is_tensor(x) and x.dim() > 2
        return x.narrow(axis, each[0], each[1]) if is_of_rows else x

    parts = [
        first(function(*(at(x, each) for x in args), **{name: at(x, each) for name, x in given.items()}))
        for each in zip(STARTS, LENGTHS, strict=True)
    ]
    return torch.cat(parts, axis)


@pytest.mark.parametrize("is_compiled", [True, False], ids=["kernels", "chunks"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_transformers(case, is_compiled, monkeypatch):
    name, kind, args, given, axis = CASES[case]
    file = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    if is_compiled and not native.is_built():
        pytest.skip("no compiled kernels")
    for each in (recurrence, rules):
        monkeypatch.setattr(each, "has_kernels", lambda x: is_compiled)
    wanted = of_sequences(getattr(file, name), args, given, axis)
    each = PackedPass(TOKENS, functions=[(file, name, recurrence.FUNCTIONS[name])])
    each.layout = types.SimpleNamespace(order=None, runs=RUNS)
    with attention.running(each):
        found = first(getattr(file, name)(*args, **given))
    assert getattr(file, name) is not recurrence.FUNCTIONS[name]
    found = found.narrow(axis, 0, TOKENS)
    assert torch.allclose(found, wanted, atol=2e-5)
    weights = torch.linspace(-1, 1, wanted.numel()).view_as(wanted)
    leaves = [x for x in (*args, *given.values()) if torch.is_tensor(x) and x.is_leaf]
    grads = [torch.autograd.grad((out * weights).sum(), leaves, retain_graph=True) for out in (found, wanted)]
    for own, other in zip(*grads, strict=True):
        assert functional.mse_loss(own, other).sqrt() <= 1e-5 * other.norm() and other.abs().max() > 0


REFUSED = {
    "reads 9 tokens, more than 8": convolution(None, 9),
    "a state space asks for z": space(z=torch.ones(1)),
    "other queries and keys than ones of length 1": (*delta()[:3], dict(g=numbers(1), beta=numbers(1)), 1),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_the_kernels_do_not_compute_is_refused(problem):
    name, _, args, given, _ = REFUSED[problem]
    with attention.running(FirstPass(TOKENS)), pytest.raises(Unsupported, match=problem):
        recurrence.FUNCTIONS[name](*args, **given)
