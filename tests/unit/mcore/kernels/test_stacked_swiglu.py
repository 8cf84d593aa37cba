"""Grouped products of experts: the results and gradients of one product after another."""

import pytest
import torch

from megarl.mcore.kernels.grouped_swiglu import grouped_swiglu
from megarl.mcore.kernels.stacked_swiglu import stack_, stack_of, stacked_swiglu

COUNTS, HIDDEN, WIDTH = torch.tensor([3, 0, 7, 1, 9]), 64, 32


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
    together = stacked_swiglu(rows, gates, COUNTS, first, second)
    found = torch.autograd.grad((together * weight).sum(), wanted)
    with torch.no_grad():
        plain = stacked_swiglu(rows, gates, COUNTS, first, second)
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
