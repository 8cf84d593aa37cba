"""Products and norms of exact rollouts, run by Triton's interpreter: rows independent of their number, layers,
gradients; norms have results and gradients of PyTorch's. Sums with their norms, against PyTorch in fp64."""

import functools
import types

import pytest
import torch
from megatron.core.tensor_parallel import layers

from megarl.mcore.kernels import linear
from megarl.mcore.kernels import norm as norm_module
from megarl.mcore.kernels.cuda import exact_rows
from megarl.mcore.kernels.cuda.exact_rows import MAX_TILE, ROWS, product
from megarl.mcore.kernels.norm import BY_ROWS, KINDS, AllHeadsRMSNorm, build_norm
from megarl.mcore.kernels.swiglu import grouped_swiglu
from megarl.mcore.lora.adapted_linear import LowRankProduct
from tests.helpers.models import interpreted_kernels, reference_kernels

INNER, OUTER = 72, 70  # fill no whole tile
OPTIONS = (False, False, False, None)  # of Megatron's layers: no fusion, no collective, no group


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    interpreted_kernels.multiply_rows_alone(monkeypatch)
    interpreted_kernels.use_one_unit(monkeypatch)


def operands(dtype=torch.float32, rows: int = ROWS + 3):
    """(x, weight, bias)."""
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, INNER), (OUTER, INNER), (OUTER,)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-5), (torch.float16, 0.02)])
def test_a_row_does_not_depend_on_the_other_rows(dtype, rounding, has_bias):
    x, weight, bias = operands(dtype)
    bias = bias if has_bias else None
    found = product(x, weight, bias)
    exact = torch.nn.functional.linear(*(t if t is None else t.double() for t in (x, weight, bias)))
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=rounding)
    for rows in (slice(1), slice(5, 8), slice(ROWS, None)):
        assert torch.equal(product(x[rows], weight, bias), found[rows])
    assert torch.equal(product(x[:4].view(2, 2, INNER), weight, bias).flatten(0, 1), found[:4])
    assert product(x[:0], weight, bias).shape == (0, OUTER)
    columns = torch.cat([x, x], dim=1)[:, :INNER]  # rows that are not adjacent
    assert torch.equal(product(columns, weight, bias), found)


@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-5), (torch.float16, 0.02)])
def test_each_head_has_a_weight_of_its_own_and_rows_that_do_not_depend_on_others(dtype, rounding):
    """Weights are views, whose rows or columns are not adjacent."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS + 3, 3, INNER, generator=generator).to(dtype)
    for shape in ((3, INNER, OUTER), (3, OUTER, INNER + 5)):
        weight = torch.randn(shape, generator=generator).to(dtype)
        weight = weight.transpose(1, 2) if shape[1] == INNER else weight[..., :INNER]
        found = exact_rows.product_by_head(x, weight)
        wanted = torch.einsum("nak,amk->nam", x.double(), weight.double())
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=rounding)
        for rows in (slice(1), slice(5, 8), slice(ROWS, None)):
            assert torch.equal(exact_rows.product_by_head(x[rows], weight), found[rows]) and found.dtype is dtype


def test_a_layer_of_an_exact_rollout_multiplies_so_and_has_the_gradients_of_others():
    x, weight, bias = operands()
    layer, found = types.SimpleNamespace(config=interpreted_kernels.exact_config()), []
    kinds = (functools.partial(linear.parallel_linear, layer), OPTIONS), (torch.nn.functional.linear, ())
    for multiply, options in kinds:
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        out = multiply(*leaves, *options)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert torch.equal(found[0][0], product(x, weight, bias))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        assert torch.equal(linear.parallel_linear(layer, x, weight, bias, *OPTIONS), found[0][0])


def test_megatrons_layers_take_it_only_in_exact_rollouts(monkeypatch):
    monkeypatch.setattr(linear.device, "has_cuda", lambda: True)
    kinds = layers.ColumnParallelLinear, layers.RowParallelLinear
    for kind in kinds:
        monkeypatch.setattr(kind, "_forward_impl", lambda layer, *args, **options: "Megatron's")
    linear.install()
    monkeypatch.setattr(linear, "parallel_linear", lambda layer, *args: "exact")
    inputs = *operands(), False
    for kind in kinds:
        assert kind._forward_impl(types.SimpleNamespace(config=interpreted_kernels.exact_config()), *inputs) == "exact"
        assert kind._forward_impl(types.SimpleNamespace(config=None), *inputs) == "Megatron's"


def test_experts_multiply_so_in_forward_passes():
    """With and without gradients, also an expert without rows; the gradients are those of other products."""
    generator = torch.Generator().manual_seed(1)
    x, gates = torch.randn(5, 16, generator=generator), torch.rand(5, generator=generator)
    first = [torch.randn(24, 16, generator=generator).requires_grad_() for _ in range(3)]
    second = [torch.randn(16, 12, generator=generator).requires_grad_() for _ in range(3)]
    calls = []

    def multiply(*args):
        calls.append(args)
        return product(*args)

    found = grouped_swiglu(x, gates, [3, 0, 2], first, second, multiply)
    assert len(calls) == 4
    with torch.no_grad():
        assert torch.equal(grouped_swiglu(x, gates, [3, 0, 2], first, second, multiply), found)
    assert len(calls) == 8
    grads = [
        torch.autograd.grad(out.sum(), [*first, *second])
        for out in (found, grouped_swiglu(x, gates, [3, 0, 2], first, second))
    ]
    torch.testing.assert_close(*grads)


def test_low_rank_factors_multiply_so():
    x, weight, bias = operands()
    factors = [(weight[:4], weight.t()[:OUTER, :4].contiguous())]
    adapted = LowRankProduct((slice(0, OUTER),), 0.5, False, False, None, product)
    found = adapted.forward(x, weight, bias, factors)
    torch.testing.assert_close(found, adapted._replace(multiply=linear.matmul).forward(x, weight, bias, factors))
    assert torch.equal(adapted.forward(x[3:5], weight, bias, factors), found[3:5])


# -- norms -----------------------------------------------------------------------------------------------------------


def norms(normalization: str, zero_centred: bool, columns: int):
    """(norm of exact rollouts, the one that other runs use) with the same random weights."""
    found = []
    for exact in (True, False):
        config = types.SimpleNamespace(
            normalization=normalization, layernorm_zero_centered_gamma=zero_centred, params_dtype=torch.float32,
            sequence_parallel=False, exact_rollout=exact,
        )  # fmt: skip
        found.append(build_norm(config, columns, eps=1e-3))
        generator = torch.Generator().manual_seed(0)
        for parameter in found[-1].parameters():
            torch.nn.init.normal_(parameter, generator=generator)
    return found


@pytest.mark.parametrize("columns", [20, MAX_TILE + 8])
@pytest.mark.parametrize("normalization, zero_centred", KINDS)
def test_rows_are_normed_alone_as_by_the_other_kernels(normalization, zero_centred, columns):
    exact, other = norms(normalization, zero_centred, columns)
    assert type(exact) is BY_ROWS[type(other)] and exact.state_dict().keys() == other.state_dict().keys()
    x = 3 * torch.randn(7, 1, columns, generator=torch.Generator().manual_seed(1)) + 1
    results = []
    for norm in (exact, other):
        leaf = x.clone().requires_grad_()
        out = norm(leaf)
        grads = torch.autograd.grad((out * out.detach().cos()).sum(), [leaf, *norm.parameters()])
        results.append([out, *grads])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    whole = results[0][0]
    assert torch.equal(exact(x[3:5]), whole[3:5]) and torch.equal(exact(x[6]), whole[6])
    unaligned = torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    assert torch.equal(exact(unaligned), whole)
    assert exact(x[:0]).shape == (0, 1, columns)


def test_results_in_16_bits_are_rounded_once():
    exact, other = norms("RMSNorm", False, 24)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(2)).half()
    found = exact.half()(x)
    assert found.dtype is torch.float16
    assert torch.equal(found, other.half().float()(x.float()).half())


def test_all_heads_together_are_a_row():
    group = types.SimpleNamespace(size=lambda: 1)
    config = {"layernorm_epsilon": 1e-3, "params_dtype": torch.float32}
    x = torch.randn(3, 1, 2, 8, generator=torch.Generator().manual_seed(3))
    exact, other = (
        AllHeadsRMSNorm(types.SimpleNamespace(**config, exact_rollout=on), 2, 8, group)(x) for on in (True, False)
    )
    torch.testing.assert_close(exact, other)
    assert exact.grad_fn is not None


# -- sums with their norms ---------------------------------------------------------------------------------------------

EPSILON = 1e-5


def drawn(rows: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Two summands, gradients of the sum and of its norm, and a weight."""
    generator = torch.Generator().manual_seed(rows * columns)
    tensors = [torch.randn(rows, 1, columns, generator=generator).to(dtype) for _ in range(4)]
    return [*tensors, (1 + 0.2 * torch.randn(columns, generator=generator)).to(dtype)]


# The interpreter cuts numbers to bf16.
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.float16, 2**-11)])
@pytest.mark.parametrize("rows, columns", [(3, 20), (70, 64), (1, 100)])
def test_sums_have_the_bits_of_operators_and_norms_are_rounded_once(rows, columns, dtype, bound):
    x, added, grad_total, grad, weight = drawn(rows, columns, dtype)
    total, out, scales = exact_rows.sum_norm(x, added, weight, EPSILON)
    assert torch.equal(total, x + added) and out.dtype is total.dtype is dtype and scales.dtype is torch.float32
    wide, gain = total.double().requires_grad_(), weight.double().requires_grad_()
    wanted = torch.nn.functional.rms_norm(wide, (columns,), gain, EPSILON)
    assert bool(((out.double() - wanted).abs() <= 1.01 * bound * wanted.abs() + 1e-6).all())
    of_norm, of_weight = torch.autograd.grad(wanted, (wide, gain), grad.double())
    grad_x, before = torch.empty_like(x), torch.randn(columns)
    grad_weight = before.clone()
    exact_rows.sum_norm_backward(grad_x, grad_weight, grad_total, grad, total, weight, scales)
    assert torch.allclose(grad_weight.double(), before + of_weight, rtol=1e-5, atol=2e-5)  # added, not rounded
    # Rounded as a gradient of the norm, then as the sum of it and the other.
    error = (grad_x.double() - (of_norm + grad_total)).abs()
    assert bool((error <= bound * (of_norm.abs() + (of_norm + grad_total).abs()) * 1.01 + 2e-6).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_they_are_what_the_emulated_device_computes(dtype):
    x, added, grad_total, grad, weight = drawn(5, 32, dtype)
    results = []
    for module in (exact_rows, reference_kernels):
        total, out, scales = module.sum_norm(x, added, weight, EPSILON)
        grad_x, grad_weight = torch.empty_like(x), torch.zeros(32)
        module.sum_norm_backward(grad_x, grad_weight, grad_total, grad, total, weight, scales)
        results.append((total, out, scales, grad_x, grad_weight))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=2**-10 if dtype is torch.float16 else 1e-5, atol=1e-5)


def test_a_norm_that_nobody_reads_gives_its_weight_no_gradient():
    """Its reader may have another path, which adds the whole gradient to the buffer."""
    x, added, _, grad, weight = drawn(3, 20, torch.float32)
    total, normed = norm_module._sum_norm(x.requires_grad_(), added, weight.requires_grad_(), EPSILON)
    total.backward(grad, retain_graph=True)
    assert weight.grad is None and torch.equal(x.grad, grad)
    inputs = [each.detach().double().requires_grad_() for each in (x, weight)]
    exact = torch.nn.functional.rms_norm(inputs[0] + added, (20,), inputs[1], EPSILON)
    found = torch.autograd.grad(normed, (x, weight), grad)
    for one, other in zip(found, torch.autograd.grad(exact, inputs, grad.double()), strict=True):
        assert torch.allclose(one.double(), other, rtol=1e-4, atol=1e-5)


def test_no_sums():
    x, weight = torch.empty(0, 1, 8), torch.ones(8)
    total, out, scales = exact_rows.sum_norm(x, x, weight, EPSILON)
    assert total.shape == out.shape == (0, 1, 8) and scales.shape == (0, 1, 1)
    grad_weight = torch.ones(8)
    exact_rows.sum_norm_backward(torch.empty_like(x), grad_weight, x, x, total, weight, scales)
    assert torch.equal(grad_weight, torch.ones(8))
