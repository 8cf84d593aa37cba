"""RMSNorm: the formula and its gradients, other precisions."""

import pytest
import torch
from torch.testing import assert_close

from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.kernels.norm import RMSNorm, ZeroCentredLayerNorm, ZeroCentredRMSNorm
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [ZeroCentredRMSNorm, ZeroCentredLayerNorm])
def test_zero_centred_norms_add_one_to_their_weights_and_round_once(kind, dtype):
    generator = torch.Generator().manual_seed(5)
    x, norm = torch.randn(9, 1, 96, generator=generator).to(dtype), kind(96, 1e-6, dtype=dtype)
    assert all(parameter.abs().max() == 0 for parameter in norm.parameters())
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.uniform_(-0.2, 0.2, generator=generator)
    wide = x.double()
    if kind is ZeroCentredLayerNorm:
        wide = wide - wide.mean(-1, keepdim=True)
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + norm.weight.double())
    expected = expected + (norm.bias.double() if kind is ZeroCentredLayerNorm else 0)
    out = norm(x)
    assert out.dtype == dtype
    rounding = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 2**-8}[dtype]  # half a last bit, relative
    assert ((out - expected).abs() <= rounding * expected.abs().clamp_min(1)).all()
    with torch.inference_mode():
        assert torch.equal(norm(x), out) and torch.equal(norm(x[:MIN_ROWS]), out[:MIN_ROWS])


def test_a_folded_weight_would_not_be_the_same():
    """A bf16 weight near 0 has more bits than 1 plus it."""
    norm = ZeroCentredRMSNorm(64, 1e-6, dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-0.02, 0.02, 64))
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    folded = torch.nn.functional.rms_norm(x, (64,), 1 + norm.weight, 1e-6)
    assert (norm(x) != folded).float().mean() > 0.1
