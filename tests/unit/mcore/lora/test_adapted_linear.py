"""The product with low-rank factors against plain autograd, merged and apart, on one rank and split over two."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from megarl.mcore.lora.targets import LoRASettings
from tests.helpers.worlds import run_world

HIDDEN, FFN, TOKENS, RANK, SCALE = 32, 64, 9, 4, 1.5
LORA = LoRASettings(RANK, SCALE * RANK, False, ("gate_proj", "up_proj", "down_proj"))


def draw(name: str, *shape: int) -> torch.Tensor:
    """Normal numbers that only the name determines."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def reference() -> dict[str, torch.Tensor]:
    """Plain autograd through an MLP of W + s·B·A: output, input gradient, and gradients of all factors."""
    x = draw("x", TOKENS, 1, HIDDEN).requires_grad_()
    weights = {"gate_proj": (FFN, HIDDEN), "up_proj": (FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}
    factors, merged = {}, {}
    for name, (rows, columns) in weights.items():
        a = factors[f"{name}.a"] = (0.3 * draw(f"{name}.a", RANK, columns)).requires_grad_()
        b = factors[f"{name}.b"] = (0.3 * draw(f"{name}.b", rows, RANK)).requires_grad_()
        merged[name] = 0.2 * draw(name, rows, columns) + SCALE * b @ a
    hidden = torch.nn.functional.silu(x @ merged["gate_proj"].T) * (x @ merged["up_proj"].T)
    output = hidden @ merged["down_proj"].T
    output.backward(draw("gradient", TOKENS, 1, HIDDEN))
    return {"output": output.detach(), "x": x.grad} | {name: factor.grad for name, factor in factors.items()}


class _SumOverRanks(torch.autograd.Function):
    """What the token dispatcher does with the experts' outputs, and the gradient that each rank gets."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def expert_layers(rank: int, dtype: torch.dtype, is_attached: bool) -> dict:
    """The results of `reference` by an expert's layers, split over the ranks of the world."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig

    from megarl.mcore.lora.adapted_linear import AdaptedLinear
    from megarl.mcore.lora.targets import Projection

    size, group = dist.get_world_size(), dist.group.WORLD
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=2, tensor_model_parallel_size=size,
        expert_tensor_parallel_size=size, perform_initialization=False, params_dtype=dtype, add_bias_linear=False,
        bf16=dtype is torch.bfloat16,
    )  # fmt: skip
    options = {"config": config, "init_method": None, "bias": False, "is_expert": True, "tp_group": group}
    fc1 = ColumnParallelLinear(HIDDEN, 2 * FFN, gather_output=False, **options)
    fc2 = RowParallelLinear(FFN, HIDDEN, input_is_parallel=True, skip_bias_add=True, **options)
    part = FFN // size
    mine = slice(rank * part, (rank + 1) * part)
    gates = [Projection("gate_proj", slice(0, part)), Projection("up_proj", slice(part, 2 * part))]
    with torch.no_grad():
        fc1.weight.copy_(torch.cat([0.2 * draw(p.name, FFN, HIDDEN)[mine] for p in gates]))
        fc2.weight.copy_(0.2 * draw("down_proj", HIDDEN, FFN)[:, mine])
    layers = [
        AdaptedLinear("mlp.linear_fc1", fc1, gates, LORA, 0),
        AdaptedLinear("mlp.linear_fc2", fc2, [Projection("down_proj", slice(0, HIDDEN))], LORA, 0),
    ]
    for layer in layers:
        layer.layer.weight.requires_grad_(False)
        layer.attach()
        layer.keep_base()
    factors = {name: f for layer in layers for name, f in layer.factors.items()}
    for name, f in factors.items():
        is_row, rows = name == "down_proj", HIDDEN if name == "down_proj" else FFN
        a, b = 0.3 * draw(f"{name}.a", RANK, FFN if is_row else HIDDEN), 0.3 * draw(f"{name}.b", rows, RANK)
        with torch.no_grad():
            f.a.copy_(a[:, mine] if is_row else a)
            f.b.copy_(b if is_row else b[mine])
    for layer in layers:
        layer.merge()
    if not is_attached:  # as after a load of a frozen model in fp32
        for layer in layers:
            del layer.layer._forward_impl
    x = draw("x", TOKENS, 1, HIDDEN).to(dtype).requires_grad_()

    def forward():
        both, _ = fc1(x)
        gate, up = both.chunk(2, -1)
        partial, _ = fc2(torch.nn.functional.silu(gate) * up)
        return _SumOverRanks.apply(partial)

    with torch.no_grad():
        rollout = forward()
    output = forward()
    assert torch.equal(rollout, output)
    if not is_attached:
        return {"output": output.detach().float()}
    output.backward(draw("gradient", TOKENS, 1, HIDDEN).to(dtype))
    grad_x = x.grad.clone()
    dist.all_reduce(grad_x)  # the dispatcher sums the parts of the input gradient
    found = {"output": output.detach(), "x": grad_x}
    for name, f in factors.items():
        found |= {f"{name}.a": f.a.grad, f"{name}.b": f.b.grad}
    return {name: value.float() for name, value in found.items()}


def whole(found: list[dict]) -> dict:
    """The ranks' parts of split gradients put together; what is whole must be equal on all ranks."""
    axes = {"gate_proj.b": 0, "up_proj.b": 0, "down_proj.a": 1}
    for name in found[0].keys() - axes:
        assert all(torch.equal(part[name], found[0][name]) for part in found), name
    return {
        name: torch.cat([part[name] for part in found], axes[name]) if name in axes else value
        for name, value in found[0].items()
    }


@pytest.mark.parametrize("size", [1, 2])
def test_experts_and_their_factors_equal_plain_autograd(size):
    """Two ranks split each expert: the mode that gloo cannot run in a whole model."""
    expected = reference()
    found = whole(run_world(expert_layers, size, torch.float32, True))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value, rtol=1e-5, atol=2e-5, msg=name)
    merged_for_good = whole(run_world(expert_layers, size, torch.float32, False))
    assert torch.equal(merged_for_good["output"], found["output"])


@pytest.mark.parametrize("size", [1, 2])
def test_factors_of_16_bits_stay_apart(size):
    expected = reference()
    found = whole(run_world(expert_layers, size, torch.bfloat16, True))
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 0.05 * value.abs().max(), name


def apart(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of one layer with merged and with separate factors, in fp32."""
    from megarl.mcore.lora.adapted_linear import LowRankProduct

    x, weight, a, b = draw("x", TOKENS, HIDDEN), draw("w", 3 * 16, HIDDEN), draw("a", RANK, HIDDEN), draw("b", 32, RANK)
    rows = torch.arange(48).view(3, 16)[:2].flatten()
    merged = weight.clone()
    merged[rows] += SCALE * b @ a
    product = LowRankProduct((rows,), SCALE, False, False, dist.group.WORLD)
    return product.forward(x, weight, None, [(a, b)]), x @ merged.T


def test_separate_factors_equal_merged_ones():
    ((found, expected),) = run_world(apart, 1)
    assert_close(found, expected, rtol=1e-5, atol=1e-4)
