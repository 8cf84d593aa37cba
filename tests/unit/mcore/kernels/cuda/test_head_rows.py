"""Kernels of the output head's rows, by Triton's interpreter: against fp64, and against single operators."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megarl.mcore.kernels import head_scores as kernel
from megarl.mcore.kernels.cuda.head_rows import SUMS, TILE, head_gradient, head_sums
from megarl.mcore.kernels.head import HeadOptions
from megarl.mcore.kernels.head_scores import head_scores
from tests.helpers.models import reference_kernels
from tests.helpers.models.output_heads import PADDED, PER_TOKEN, T, V, cut_chunks, problem, use_row_kernels, weighted
from tests.helpers.worlds import run_world

ROWS = 5


@pytest.mark.parametrize("columns, count", [(TILE + 40, TILE + 9), (64, 64), (16, 1), (16, 0)])
@pytest.mark.parametrize("own_temperatures", [False, True])
def test_sums_and_gradients_are_those_of_fp64(columns, count, own_temperatures):
    generator = torch.Generator().manual_seed(columns)
    logits = 4 * torch.randn(ROWS, columns, generator=generator)
    logits[:, count:] = 1e9  # padding must not be seen
    logits[1] = 0.0
    targets = torch.tensor([0, count - 1, -3, columns + 7, count // 2])  # some are on other ranks
    temperatures = torch.linspace(0.5, 1.5, ROWS) if own_temperatures else None
    arguments = temperatures, 0.7, targets, count
    sums, wanted = (torch.full((SUMS, ROWS + 3), 7.0)[:, 1:-2] for _ in range(2))  # among those of other rows
    head_sums(sums, logits, *arguments)
    reference_kernels.head_sums(wanted, logits, *arguments)
    assert_close(sums, wanted, rtol=1e-5, atol=1e-5)
    top, total, weighted, square, _ = wanted
    if count == 0:  # then the sums are those of other ranks
        top, total = torch.zeros(ROWS), torch.ones(ROWS)
    statistics = torch.stack([top, total, total.log() - weighted / total, square / total.square()])
    grads = torch.randn(3, ROWS, generator=generator)
    found, right = (torch.full((ROWS, columns), 7.0) for _ in range(2))
    head_gradient(found, logits, *arguments, statistics, grads)
    reference_kernels.head_gradient(right, logits, *arguments, statistics, grads)
    assert_close(found, right, rtol=1e-4, atol=1e-5)
    assert not found[:, count:].any() and (count <= 1 or found[0, 0] != 0)


def both_ways(rank):
    """Gradients of some outputs with kernels of rows, a chunk or all chunks at a time, against single operators."""
    hidden, weight, targets = problem()
    inputs = hidden.requires_grad_(), weight.requires_grad_()
    cut_chunks(4, PADDED)
    multiplied = []
    gradient_class = kernel.HeadGradients
    add = gradient_class.add_products
    gradient_class.add_products = lambda *args: multiplied.append(len(args[-1])) or add(*args)

    def gradients(used):
        scores = head_scores(*inputs, targets, HeadOptions(PER_TOKEN, V, dist.group.WORLD))
        return torch.autograd.grad(weighted(scores, used), inputs)

    choices = [(1, None, None), (1, -2, None), (None, 1, 2)]
    wanted = [gradients(used) for used in choices]
    use_row_kernels()
    for together, sizes in ((1, [4] * 5), (2**28, [T])):
        kernel.MAX_TOGETHER = together
        for used, right in zip(choices, wanted, strict=True):
            multiplied.clear()
            for x, y in zip(gradients(used), right, strict=True):
                assert_close(x, y, rtol=1e-4, atol=1e-5)
            assert multiplied == sizes
    return True


def test_kernels_of_rows_give_the_gradients_of_single_operators():
    assert run_world(both_ways, 1) == [True]
