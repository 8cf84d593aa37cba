"""Norms of exact rollouts, run by Triton's interpreter: rows alone, results and gradients of PyTorch's."""

import types

import pytest
import torch

from megarl.mcore.kernels.cuda.row_norm import MAX_TILE
from megarl.mcore.kernels.norm import BY_ROWS, KINDS, AllHeadsRMSNorm, Norm


def norms(normalization: str, zero_centred: bool, columns: int):
    """(norm of exact rollouts, the one that other runs use) with the same random weights."""
    found = []
    for exact in (True, False):
        config = types.SimpleNamespace(
            normalization=normalization, layernorm_zero_centered_gamma=zero_centred, params_dtype=torch.float32,
            sequence_parallel=False, exact_rollout=exact,
        )  # fmt: skip
        found.append(Norm(config, columns, eps=1e-3))
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
