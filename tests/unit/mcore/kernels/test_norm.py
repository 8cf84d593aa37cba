"""RMSNorm: the formula and its gradients, other precisions."""

import pytest
import torch
from torch.testing import assert_close

from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.kernels.norm import RMSNorm
from tests.helpers.worlds import run_world


def norms(rank):
    """[(result, gradients)] of megarl's norm and of the formula in float64, and whether rows and modes agree."""
    generator = torch.Generator().manual_seed(4)
    x, grad = (torch.randn(50, 1, 96, generator=generator) for _ in range(2))
    norm = RMSNorm(96, 1e-5)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0, generator=generator)
    inputs = [x.clone().requires_grad_(), norm.weight]
    out = norm(inputs[0])
    found = [out.detach(), *torch.autograd.grad(out, inputs, grad)]
    exact = [each.detach().double().requires_grad_() for each in inputs]
    right = exact[0] / (exact[0].square().mean(-1, keepdim=True) + 1e-5).sqrt() * exact[1]
    expected = [right.detach(), *torch.autograd.grad(right, exact, grad.double())]
    with torch.inference_mode():
        same = [torch.equal(norm(x[:rows]), found[0][:rows]) for rows in (MIN_ROWS, 7, 50)]
    return [each.double() for each in found], expected, same


def test_the_norm_and_its_gradients_are_those_of_the_formula():
    ((found, expected, same),) = run_world(norms, 1)
    assert_close(found, expected, rtol=5e-5, atol=5e-5)
    assert all(same)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norms_of_other_precisions_are_torchs(dtype):
    x, norm = torch.randn(6, 32).to(dtype), RMSNorm(32, 1e-5, dtype=dtype)
    assert torch.equal(norm(x), torch.nn.functional.rms_norm(x, (32,), norm.weight, 1e-5))
