"""Grouped products of experts: the results and gradients of one product after another."""

import pytest
import torch

from megarl.mcore.kernels.grouped_swiglu import grouped_swiglu
from megarl.mcore.kernels.stacked_swiglu import stack_, stack_of, stacked_swiglu

COUNTS, HIDDEN, WIDTH = torch.tensor([3, 0, 7, 1, 9]), 64, 32
ENDS = COUNTS.cumsum(0).int()


def inputs(dtype):
    """(rows, gates, first weights, second weights) that want gradients."""
    generator, total = torch.Generator().manual_seed(0), int(COUNTS.sum())

    def drawn(*shape):
        return torch.randn(*shape, generator=generator).mul(0.3).to(dtype).requires_grad_()

    first, second = (
        [torch.nn.Parameter(drawn(*shape)) for _ in COUNTS] for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    )
    return drawn(total, HIDDEN), drawn(total), first, second


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_equal_the_products_of_each_expert(dtype, is_stacked):
    rows, gates, first, second = inputs(dtype)
    wanted = [rows, gates, *first, *second]
    weight = torch.linspace(-1, 1, rows.numel()).view_as(rows).to(dtype)
    one_by_one = grouped_swiglu(rows, gates, COUNTS.tolist(), first, second)
    expected = torch.autograd.grad((one_by_one * weight).sum(), wanted)
    if is_stacked:
        stack_(first)
        stack_(second)
    together = stacked_swiglu(rows, gates, ENDS, first, second)
    found = torch.autograd.grad((together * weight).sum(), wanted)
    with torch.no_grad():
        plain = stacked_swiglu(rows, gates, ENDS, first, second)
    bound = 1e-5 if dtype is torch.float32 else 2**-7
    assert torch.equal(plain, together)
    for one, other in zip((together, *found), (one_by_one, *expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=bound * float(other.detach().abs().max().clamp(min=1e-3)))


def test_a_stack_is_a_view_where_weights_lie_at_equal_distances():
    _, _, first, _ = inputs(torch.float32)
    values = [weight.detach().clone() for weight in first]
    assert stack_of(first).data_ptr() != first[0].data_ptr()
    stack_(first)
    assert stack_of(first).data_ptr() == first[0].data_ptr() and torch.equal(stack_of(first), torch.stack(values))
    buffer = torch.randn(5 * 3, 2 * WIDTH, HIDDEN)  # of several weights a layer
    spread = [torch.nn.Parameter(buffer[3 * i + 1]) for i in range(5)]
    assert stack_of(spread).data_ptr() == buffer[1].data_ptr() and torch.equal(stack_of(spread), buffer[1::3])
    backwards = spread[::-1]
    assert torch.equal(stack_of(backwards), buffer[1::3].flip(0))


@pytest.mark.parametrize("trains", [False, True])
def test_a_single_row_may_be_part_of_a_wider_one(trains):
    _, _, first, second = inputs(torch.bfloat16)
    wide, ends = torch.randn(1, HIDDEN + 1).bfloat16(), torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32)
    with torch.set_grad_enabled(trains):
        found = stacked_swiglu(wide[:, :-1], wide[:, -1], ends, first, second)
        expected = stacked_swiglu(wide[:, :-1].clone(), wide[:, -1], ends, first, second)
    assert torch.equal(found, expected) and found.any()


def test_rows_after_the_last_expert_change_nothing():
    rows, gates, first, second = inputs(torch.bfloat16)
    ends = ENDS.clamp(max=15)
    with torch.no_grad():
        found = stacked_swiglu(rows, gates, ends, first, second)[:15]
        expected = stacked_swiglu(rows[:15], gates[:15], ends, first, second)
    assert torch.equal(found, expected)
