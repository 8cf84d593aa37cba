"""Convolutions of runs and ways through chunks, by Triton's interpreter, against float64."""

import pytest
import torch
from torch import Tensor

from megarl.mcore.kernels.cuda import recurrent_chunks
from tests.helpers.models import reference_kernels


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


@pytest.mark.parametrize("heads, width, taps", [(4, 24, 4), (0, 0, 2), (2, 130, 3)])
def test_convolutions_and_their_gradients_are_those_of_float64(heads, width, taps):
    """With inputs of states, without a bias, of channels after normed heads; rows that are read by several rows, and
    zeros."""
    rows, channels, states = 45, heads * width + 20, 2
    x, weight, bias = 3 * normal(rows, channels + 5)[:, 2:-3], normal(channels, 1, taps), normal(channels)
    inputs, generator = normal(states, taps - 1, channels), torch.Generator().manual_seed(1)
    read = torch.randint(rows + 1, (taps, rows), generator=generator)
    of_states = torch.randint(rows + 1 + states * (taps - 1), (taps, 50), generator=generator)
    for activates, own_bias in ((True, None), (False, bias)):
        options = [heads, width], 1e-6, activates
        for own, kept in ((read, None), (of_states, inputs)):
            found = recurrent_chunks.convolve_runs(x, weight, own_bias, own, kept, *options)
            expected = reference_kernels.convolve_runs(x, weight, own_bias, own, kept, *options)
            assert (
                found.shape == (own.shape[1], channels)
                and (found - expected).abs().max() <= 1e-5 * expected.abs().max()
            )
        bounds = torch.cat([torch.zeros(1).long(), read.flatten().bincount(minlength=rows + 1).cumsum(0)[:rows]])
        table, grad = [read, bounds, read.flatten().argsort(stable=True)], normal(rows, channels)
        pair = [
            each.convolve_runs_backward(grad, x, weight, own_bias, table, *options)
            for each in (recurrent_chunks, reference_kernels)
        ]
        for one, other in zip(*pair, strict=True):
            assert one.shape == other.shape and (one - other).abs().max() <= 1e-5 * other.abs().max()


WALKS = [(24, 40, 1, True), (24, 40, 24, True), (128, 64, 1, False), (5, 16, 5, True)]  # keys, values, decays, old


@pytest.mark.parametrize("is_backward", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("keys, values, decays, has_old", WALKS)
def test_ways_through_chunks_are_those_of_float64(keys, values, decays, has_old, is_backward):
    """Runs of two chunks, of none, and of three, which begin with nothing, a memory, and the sum of two."""
    chunks, heads, rows = 5, 2, 16
    way = torch.tensor([[0, 2, 0, 0, -1], [2, 2, 1, 2, 1], [2, 5, 1, 3, 0]])
    wide = normal(chunks * heads * rows, keys + values)  # rows of a wider tensor, as those of a solved system
    old, new = wide[:, :keys] if has_old else None, wide[:, keys:]
    left, factors = 0.3 * normal(chunks * heads * rows, keys), normal(chunks * heads, decays).sigmoid()
    added = normal(chunks, heads, keys, values) if is_backward else None
    starts = normal(3, heads, keys, values)
    found, expected = (
        [torch.full(shape, torch.nan) for shape in (
            (chunks, heads, keys, values), (chunks, heads, rows, values), (2, heads, keys, values)
        )]
        for _ in range(2)
    )  # fmt: skip
    recurrent_chunks.walk_chunks(way, starts, old, new, left, factors, added, found)
    reference_kernels.walk_chunks(way, starts, old, new, left, factors, added, expected)
    for one, other in zip(found, expected, strict=True):
        assert other.abs().max() > 0.1 and (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("has_old", [True, False], ids=["delta rule", "state space"])
def test_a_run_that_is_cut_at_a_chunk_or_beside_others_has_the_same_bits(has_old):
    chunks, heads, rows, keys, values = 5, 2, 16, 24, 40
    old, new, left = (normal(chunks * heads * rows, each) for each in (keys, values, keys))
    terms = old if has_old else None, new, 0.2 * left, normal(chunks * heads, 1).sigmoid(), None
    found = [(normal(chunks, heads, keys, values), normal(chunks, heads, rows, values)) for _ in range(2)]
    ends, starts = torch.zeros(2, heads, keys, values), torch.zeros(0, heads, keys, values)
    recurrent_chunks.walk_chunks(torch.tensor([[0, 4, 0, 0, 0]]), starts, *terms, [*found[0], ends])
    whole = ends[0].clone()
    way = torch.tensor([[4, 5, 0, 0, -1], [0, 3, 0, 0, 1]])
    recurrent_chunks.walk_chunks(way, starts, *terms, [*found[1], ends])
    recurrent_chunks.walk_chunks(torch.tensor([[3, 4, 1, 2, 0]]), ends.clone(), *terms, [*found[1], ends])
    assert torch.equal(ends[0], whole) and not torch.equal(ends[0], ends[1])
    assert all(torch.equal(one[:4], other[:4]) for one, other in zip(*found, strict=True))
