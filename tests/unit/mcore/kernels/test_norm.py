"""Norms: their formulas and gradients, other precisions; over all heads whole and split over tensor-parallel ranks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.kernels.norm import (
    AllHeadsRMSNorm,
    RMSNorm,
    ZeroCentredLayerNorm,
    ZeroCentredRMSNorm,
    add_normed,
)
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


def test_a_norm_returns_what_came_with_a_sum_unless_another_norm_or_no_gradient_made_it():
    norm, x, made = RMSNorm(8, 1e-5), torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    x.normed = norm, made
    other = RMSNorm(8, 1e-5)
    assert norm(x) is norm(x) is made
    assert torch.equal(other(x), other(x.clone()))
    x.requires_grad_()  # what came with it was made by a layer that is computed again in backward
    assert torch.equal(norm(x), other(x))


def test_a_sum_on_a_cpu_is_the_sum():
    residual, output, norm = torch.randn(3, 8), torch.randn(3, 8), RMSNorm(8, 1e-5)
    expected = residual + output
    assert torch.equal(add_normed(residual, output, norm), expected)
    with torch.no_grad():
        assert torch.equal(add_normed(residual, output, None), expected)


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


# -- over all heads ------------------------------------------------------------------------------------------------

HEADS, D, TOKENS = 4, 8, 9


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm_of_all_heads(rank, dtype):
    """(result, gradient of the input, of the weights) for the heads of this rank."""
    size = dist.get_world_size()
    config = SimpleNamespace(layernorm_epsilon=1e-5, params_dtype=dtype)
    norm = AllHeadsRMSNorm(config, HEADS // size, D, dist.group.WORLD)
    with torch.no_grad():
        norm.weight.copy_(weights().chunk(size)[rank])
    x, grad = (drawn(TOKENS, 1, HEADS, D, seed=i).chunk(size, 2)[rank].to(dtype) for i in (1, 2))
    x = x.detach().requires_grad_()
    out = norm(x)
    gradients = torch.autograd.grad(out, [x, norm.weight], grad)
    with torch.inference_mode():
        assert torch.equal(norm(x), out) and torch.equal(norm(x[:4]), out[:4])
    return out.detach(), *gradients


def weights():
    """1 ± 0.2, of all heads."""
    return 1 + 0.2 * drawn(HEADS * D, seed=3)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_norm_over_all_heads_and_its_gradients_are_those_of_the_formula(size):
    outs, grads_x, grads_w = zip(*run_world(norm_of_all_heads, size, torch.float32), strict=True)
    x, weight = drawn(TOKENS, 1, HEADS, D, seed=1).double().requires_grad_(), weights().double().requires_grad_()
    flat = x.flatten(1)
    expected = (flat / (flat.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight).view_as(x)
    wanted = torch.autograd.grad(expected, [x, weight], drawn(TOKENS, 1, HEADS, D, seed=2).double())
    found = torch.cat(outs, 2), torch.cat(grads_x, 2), torch.cat(grads_w)
    for one, other in zip(found, (expected, *wanted), strict=True):
        assert_close(one.double(), other.detach(), rtol=1e-5, atol=1e-5)


def test_the_norm_over_all_heads_rounds_bf16_once():
    ((out, *_),) = run_world(norm_of_all_heads, 1, torch.bfloat16)
    x = drawn(TOKENS, 1, HEADS, D, seed=1).bfloat16().double().flatten(1)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights().bfloat16().double()
    assert torch.equal(out.flatten(1), expected.bfloat16())
