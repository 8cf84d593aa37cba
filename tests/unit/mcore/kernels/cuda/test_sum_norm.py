"""Sums with their norms on CUDA devices, run by Triton's interpreter, against PyTorch in fp64."""

import pytest
import torch

from megarl.mcore.kernels.cuda import sum_norm as kernels
from tests.helpers.models import reference_kernels

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
    total, out, scales = kernels.sum_norm(x, added, weight, EPSILON)
    assert torch.equal(total, x + added) and out.dtype is total.dtype is dtype and scales.dtype is torch.float32
    wide, gain = total.double().requires_grad_(), weight.double().requires_grad_()
    wanted = torch.nn.functional.rms_norm(wide, (columns,), gain, EPSILON)
    assert bool(((out.double() - wanted).abs() <= 1.01 * bound * wanted.abs() + 1e-6).all())
    of_norm, of_weight = torch.autograd.grad(wanted, (wide, gain), grad.double())
    grad_x, before = torch.empty_like(x), torch.randn(columns)
    grad_weight = before.clone()
    kernels.sum_norm_backward(grad_x, grad_weight, grad_total, grad, total, weight, scales)
    assert torch.allclose(grad_weight.double(), before + of_weight, rtol=1e-5, atol=2e-5)  # added, not rounded
    # Rounded as a gradient of the norm, then as the sum of it and the other.
    error = (grad_x.double() - (of_norm + grad_total)).abs()
    assert bool((error <= bound * (of_norm.abs() + (of_norm + grad_total).abs()) * 1.01 + 2e-6).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_they_are_what_the_emulated_device_computes(dtype):
    x, added, grad_total, grad, weight = drawn(5, 32, dtype)
    results = []
    for module in (kernels, reference_kernels):
        total, out, scales = module.sum_norm(x, added, weight, EPSILON)
        grad_x, grad_weight = torch.empty_like(x), torch.zeros(32)
        module.sum_norm_backward(grad_x, grad_weight, grad_total, grad, total, weight, scales)
        results.append((total, out, scales, grad_x, grad_weight))
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=2**-10 if dtype is torch.float16 else 1e-5, atol=1e-5)


def test_no_rows():
    x, weight = torch.empty(0, 1, 8), torch.ones(8)
    total, out, scales = kernels.sum_norm(x, x, weight, EPSILON)
    assert total.shape == out.shape == (0, 1, 8) and scales.shape == (0, 1, 1)
    grad_weight = torch.ones(8)
    kernels.sum_norm_backward(torch.empty_like(x), grad_weight, x, x, total, weight, scales)
    assert torch.equal(grad_weight, torch.ones(8))
