"""SwiGLU of CUDA devices, run by Triton's interpreter, against PyTorch in fp64."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch.nn.functional import silu

from megarl.mcore.kernels.cuda import mlp_rows
from megarl.mcore.kernels.cuda.mlp_rows import (
    TILE,
    swiglu_gated,
    swiglu_gated_backward,
    swiglu_rows,
    swiglu_rows_backward,
)
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


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float16, 2**-11)])
@pytest.mark.parametrize("columns", [20, TILE + 24])
def test_results_times_gates_have_the_bits_of_operators_and_gradients_are_rounded_once(columns, dtype, bound):
    generator = torch.Generator().manual_seed(columns)
    x = (4 * torch.randn(3, 2 * columns, generator=generator)).to(dtype)
    grad, gates = torch.randn(3, columns, generator=generator).to(dtype), torch.tensor([0.25, 1.7, 0.0])
    gated = swiglu_gated(x, gates, None)
    assert torch.equal(gated, swiglu_rows(x).mul_(gates.unsqueeze(1))) and gated.dtype is dtype
    wide, factors = x.double().requires_grad_(), gates.double().requires_grad_()
    gate, up = wide.chunk(2, dim=-1)
    wanted = torch.autograd.grad(silu(gate) * up * factors.unsqueeze(1), (wide, factors), grad.double())
    grad_x, grad_gates, again = swiglu_gated_backward(grad, x, gates, None)
    assert torch.equal(again, gated) and grad_gates.dtype is torch.float32
    assert bool(((grad_x.double() - wanted[0]).abs() <= 1.01 * bound * wanted[0].abs() + 4 * bound**2 + 1e-6).all())
    assert torch.allclose(grad_gates.double(), wanted[1], rtol=1e-4, atol=1e-3)
    places, all_gates = torch.tensor([4, 0, 2]), torch.full((5,), torch.nan)
    all_gates[places] = gates
    found = swiglu_gated_backward(grad, x, all_gates, places)
    assert torch.equal(swiglu_gated(x, all_gates, places), gated) and torch.equal(found[0], grad_x)
    for one, other in zip(found, reference_kernels.swiglu_gated_backward(grad, x, all_gates, places), strict=True):
        assert torch.allclose(one, other, rtol=2 * bound, atol=1e-4)
    assert torch.equal(found[1], torch.zeros(5).index_copy_(0, places, grad_gates)) and torch.equal(found[2], gated)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_extreme_gates_give_numbers():
    gates = torch.tensor([-200.0, -88.0, 0.0, 88.0, 200.0])
    x = torch.cat([gates, torch.full_like(gates, 2.0)]).unsqueeze(0)
    assert torch.allclose(swiglu_rows(x)[0], 2 * silu(gates), atol=1e-30)
    assert swiglu_rows_backward(torch.ones(1, 5), x).isfinite().all()


def test_no_rows():
    x = torch.empty(0, 8)
    assert swiglu_gated(x, torch.empty(0), None).shape == (0, 4)
    assert swiglu_rows(x).shape == (0, 4) and swiglu_rows_backward(torch.empty(0, 4), x).shape == (0, 8)


@pytest.mark.parametrize("kind", ["softmax", "softmax_first", "sigmoid"])
@pytest.mark.parametrize("each, has_bias, scale", [(3, True, 2.5), (1, False, 1.0)])
def test_routes_are_those_of_operators_and_their_gradients_those_of_the_formula(kind, each, has_bias, scale):
    generator = torch.Generator().manual_seed(each)
    logits, grad = (torch.randn(6, 12, generator=generator) for _ in range(2))
    logits[1] = 0.0  # equal scores
    bias = torch.randn(12, generator=generator) if has_bias else None
    for given in (None, torch.stack([torch.randperm(12, generator=generator)[:each].sort().values for _ in range(6)])):
        probs, routing_map, experts = mlp_rows.route(logits, bias, given, each, kind, scale)
        expected = reference_kernels.route(logits, bias, given, each, kind, scale)
        assert torch.equal(routing_map, expected[1]) and torch.equal(experts, expected[2])
        assert torch.allclose(probs, expected[0], rtol=1e-6, atol=1e-7) and not probs[~routing_map].any()
        exact = logits.double().requires_grad_()
        wanted = torch.autograd.grad(
            reference_kernels.gates_of(exact, experts, kind) * scale, exact, grad.double().gather(1, experts)
        )[0]
        found = mlp_rows.route_backward(grad, logits, routing_map, each, kind, scale)
        assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-6)
        again = reference_kernels.route_backward(grad, logits, routing_map, each, kind, scale)
        assert torch.allclose(found, again, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("kind", ["softmax", "softmax_first", "sigmoid"])
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_every_token_has_its_experts_whatever_its_scores(value, kind):
    logits = torch.full((2, 5), value)
    logits[1, 3] = 1.0
    _, routing_map, experts = mlp_rows.route(logits, None, None, 2, kind, 1.0)
    assert routing_map.sum(1).tolist() == [2, 2] and bool((experts[:, 0] < experts[:, 1]).all())


def test_routes_are_those_of_megatrons_router():
    logits = torch.randn(9, 16, generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(-0.2, 0.2, 16)
    for kind, own in (
        ("softmax", {}),
        ("softmax_first", {"use_pre_softmax": True}),
        ("sigmoid", {"expert_bias": bias}),
    ):
        options = {"score_function": kind.split("_")[0], "scaling_factor": 2.5, **own}
        expected = topk_routing_with_score_function(logits, 4, **options)
        found = mlp_rows.route(logits, own.get("expert_bias"), None, 4, kind, 2.5)
        assert torch.equal(found[1], expected[1]) and torch.allclose(found[0], expected[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("tokens, experts, each", [(1, 8, 2), long((70, 24, 3)), (40, 5, 1), long((20, 128, 8))])
def test_pairs_lie_in_the_order_of_experts_and_their_sums_have_the_same_bits(tokens, experts, each, monkeypatch):
    monkeypatch.setattr(mlp_rows, "PAIR_TILE", 256)  # so that some tokens, and channels, are in other tiles
    monkeypatch.setattr(mlp_rows, "CHANNEL_TILE", 64)
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.rand(tokens, experts, generator=generator).topk(each).indices
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, chosen, True)
    found, expected = (module.expert_pairs(routing_map, each) for module in (mlp_rows, reference_kernels))
    assert [each.dtype for each in found] == [torch.int64] * 3 + [torch.int32]
    assert all(map(torch.equal, found, expected))
    values = torch.randn(tokens * each, 70, generator=generator)
    for dtype in (torch.float32, torch.float16):  # the interpreter cuts numbers to bf16
        sums = [module.sum_pairs(values.to(dtype), found[2], tokens) for module in (mlp_rows, reference_kernels)]
        assert torch.equal(*sums) and sums[0].dtype is dtype
