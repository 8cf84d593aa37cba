"""SwiGLU of CUDA devices, run by Triton's interpreter, against PyTorch in fp64."""

import pytest
import torch
from torch.nn.functional import silu

from megarl.mcore.kernels.cuda import mlp_rows
from megarl.mcore.kernels.cuda.mlp_rows import TILE, swiglu_rows, swiglu_rows_backward
from tests.helpers.models import reference_kernels
from tests.helpers.tiers import long


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float16, 2**-11)])
@pytest.mark.parametrize("rows, columns", [(3, 20), (2, TILE), (2, TILE + 24)])
def test_results_and_gradients_are_rounded_once(rows, columns, dtype, bound):
    generator = torch.Generator().manual_seed(columns)
    x = (4 * torch.randn(rows, 2 * columns, generator=generator)).to(dtype)
    grad = torch.randn(rows, columns, generator=generator).to(dtype)
    wide = x.double().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    wanted = silu(gate) * up
    found = swiglu_rows(x), swiglu_rows_backward(grad, x)
    for result, exact in zip(found, (wanted, *torch.autograd.grad(wanted, wide, grad.double())), strict=True):
        assert result.dtype is dtype
        error = (result.double() - exact).abs()
        assert bool((error <= 1.01 * bound * exact.abs() + 4 * bound**2 + 1e-7).all())


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_extreme_gates_give_numbers():
    gates = torch.tensor([-200.0, -88.0, 0.0, 88.0, 200.0])
    x = torch.cat([gates, torch.full_like(gates, 2.0)]).unsqueeze(0)
    assert torch.allclose(swiglu_rows(x)[0], 2 * silu(gates), atol=1e-30)
    assert swiglu_rows_backward(torch.ones(1, 5), x).isfinite().all()


def test_no_rows():
    x = torch.empty(0, 8)
    assert swiglu_rows(x).shape == (0, 4) and swiglu_rows_backward(torch.empty(0, 4), x).shape == (0, 8)


@pytest.mark.parametrize("tokens, experts, each", [(1, 8, 2), long((70, 24, 3)), (40, 5, 1), long((20, 128, 8))])
def test_pairs_lie_in_the_order_of_experts_and_their_sums_have_the_same_bits(tokens, experts, each, monkeypatch):
    monkeypatch.setattr(mlp_rows, "TOKEN_TILE", 32)  # so that some tokens, and channels, are in other tiles
    monkeypatch.setattr(mlp_rows, "CHANNEL_TILE", 64)
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, experts, generator=generator).topk(each).indices
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
    counts = routing_map.sum(0)
    found, expected = (module.expert_pairs(routing_map, counts, each) for module in (mlp_rows, reference_kernels))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and one.dtype is torch.int64
    values = torch.randn(tokens * each, 70, generator=generator)
    for dtype in (torch.float32, torch.float16):  # the interpreter cuts numbers to bf16
        sums = [module.sum_pairs(values.to(dtype), found[2], tokens) for module in (mlp_rows, reference_kernels)]
        assert torch.equal(*sums) and sums[0].dtype is dtype
