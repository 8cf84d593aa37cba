"""The norm over all heads: its formula and gradients, whole and split over tensor-parallel ranks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from tests.helpers.worlds import run_world

HEADS, D, TOKENS = 4, 8, 9


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm_of_rank(rank, dtype):
    """(result, gradient of the input, of the weights) for the heads of this rank."""
    from megarl.mcore.kernels.all_heads_norm import AllHeadsRMSNorm

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
def test_the_norm_and_its_gradients_are_those_of_the_formula(size):
    outs, grads_x, grads_w = zip(*run_world(norm_of_rank, size, torch.float32), strict=True)
    x, weight = drawn(TOKENS, 1, HEADS, D, seed=1).double().requires_grad_(), weights().double().requires_grad_()
    flat = x.flatten(1)
    expected = (flat / (flat.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight).view_as(x)
    wanted = torch.autograd.grad(expected, [x, weight], drawn(TOKENS, 1, HEADS, D, seed=2).double())
    found = torch.cat(outs, 2), torch.cat(grads_x, 2), torch.cat(grads_w)
    for one, other in zip(found, (expected, *wanted), strict=True):
        assert_close(one.double(), other.detach(), rtol=1e-5, atol=1e-5)


def test_bf16_is_rounded_once():
    ((out, *_),) = run_world(norm_of_rank, 1, torch.bfloat16)
    x = drawn(TOKENS, 1, HEADS, D, seed=1).bfloat16().double().flatten(1)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights().bfloat16().double()
    assert torch.equal(out.flatten(1), expected.bfloat16())
