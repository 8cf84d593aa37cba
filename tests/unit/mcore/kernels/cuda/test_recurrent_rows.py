"""Kernels of a token of each state, by Triton's interpreter, against float64; rows of padding touch no state."""

import pytest
import torch
from torch import Tensor

from megarl.mcore.kernels.cuda import recurrent_rows
from megarl.mcore.recurrence.delta_rule import EPSILON
from tests.helpers.models import reference_kernels

STATES, NUMBERS = 6, (4, -1, 0, 5, -1)
SIZES = [(2, 6, 24, 40, 4), (1, 2, 16, 128, 2), (4, 4, 128, 64, 3)]  # groups, heads, keys, values, taps


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def assert_same(name: str, arguments: list, written: tuple[int, ...]):
    """That a kernel and its reference write the same into the arguments with these numbers."""
    found, expected = ([x.clone() if i in written else x for i, x in enumerate(arguments)] for _ in range(2))
    getattr(recurrent_rows, name)(*found)
    getattr(reference_kernels, name)(*expected)
    used = [number >= 0 for number in NUMBERS]
    for i in written:
        rows = used if len(found[i]) == len(NUMBERS) else slice(None)
        assert (found[i] - expected[i])[rows].abs().max() <= 1e-5 * expected[i].abs().max()
        assert found[i].isfinite().all() and not torch.equal(found[i], arguments[i])
        if len(found[i]) == STATES:
            others = [state for state in range(STATES) if state not in NUMBERS]
            assert torch.equal(found[i][others], arguments[i][others])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the sigmoid is 0 there
@pytest.mark.parametrize("groups, heads, keys, values, taps", SIZES)
def test_rows_are_those_of_float64(groups, heads, keys, values, taps):
    rows, numbers, channels = len(NUMBERS), torch.tensor(NUMBERS, dtype=torch.int32), 2 * groups * keys + heads * values
    wide, of_heads = 20 * normal(rows, channels + 3 * heads), normal(3, heads)  # gates of all sizes
    of_keys, biases = 20 * normal(rows, heads * (keys + 1)), normal(heads * keys)
    x, *gates = wide.split((channels, heads, heads, heads), 1)
    inputs, memories = normal(STATES, taps - 1, channels), normal(STATES, heads, keys, values)
    out, mixed, read = torch.zeros(rows, channels), normal(rows, channels), torch.zeros(rows, heads, values)
    for bias in (None, normal(channels)):
        assert_same("convolve_rows", [x, normal(channels, 1, taps), bias, numbers, inputs, out], (4, 5))
    of_delta, of_space = [*gates[:2], *of_heads[:2]], [gates[2], *of_heads]
    of_channels = [of_keys[:, :-heads], of_keys[:, -heads:], of_heads[0], biases]  # a decay of each channel of a key
    for of_rule, bound in ((of_delta, None), (of_channels, None), (of_channels, -5.0)):
        assert_same("delta_rows", [mixed, of_rule, numbers, memories, read, groups, EPSILON, bound], (3, 4))
    assert_same("space_rows", [mixed, of_space, numbers, memories, read, groups, 0.01], (3, 4))
