"""Products, experts and norms of modules of transformers: transformers' own numbers, and bits that no other row
changes."""

import copy

import pytest
import torch
from torch.nn import functional

from megarl.mcore.any_model import rows
from tests.helpers.folders import any_types
from tests.helpers.models import interpreted_kernels
from tests.helpers.tiers import by_default

# Layouts: plain; transposed, with biases and another activation; without a gate.
KINDS = ("ernie4_5_moe", "gpt_oss", "nemotron_h")
TOKENS, CHOSEN = 37, 2


@pytest.fixture(scope="module")
def experts_of():
    """The experts of a type's first layer that has some, with random biases."""
    kept = {}

    def find(kind):
        if kind not in kept:
            module = any_types.small_module(kind)
            kept[kind] = next(each for each in module.modules() if hasattr(each, "is_transposed"))
            for name, weight in kept[kind].named_parameters():
                weight.data = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3
        return kept[kind]

    return find


def inputs_of(experts):
    generator = torch.Generator().manual_seed(4)
    width = (experts.gate_up_proj if experts.has_gate else experts.up_proj).shape[1 if experts.is_transposed else 2]
    hidden = torch.randn(TOKENS, width, generator=generator)
    chosen = torch.rand(TOKENS, experts.num_experts, generator=generator).topk(CHOSEN).indices
    return hidden, chosen, torch.rand(TOKENS, CHOSEN, generator=generator)


@pytest.mark.parametrize("kind", by_default(KINDS, ("gpt_oss", "nemotron_h")))
def test_experts_compute_what_transformers_own_do_with_gradients(kind, experts_of):
    experts = experts_of(kind)
    found, wanted = (_with_gradients(experts, compute) for compute in (rows.experts, None))
    assert all(torch.allclose(own, other, atol=1e-4) for own, other in zip(found, wanted, strict=True))
    assert len(found) == 3 + len(list(experts.parameters())) and all(x.any() for x in found)


def _with_gradients(experts, compute):
    """Output and gradients; `compute`: in place of transformers' eager function."""
    experts.config._experts_implementation = "eager"
    hidden, chosen, gates = (x.requires_grad_(x.is_floating_point()) for x in inputs_of(experts))
    out = compute(experts, hidden, chosen, gates) if compute else experts(hidden, chosen, gates)
    return [out, *torch.autograd.grad(out.square().sum(), [hidden, gates, *experts.parameters()])]


@pytest.mark.parametrize("kind", by_default(KINDS, ("gpt_oss",)))
def test_grouped_products_compute_the_same_experts(kind, experts_of):
    """In bf16, in which a GPU computes them; the last expert has no row, and two rows are of no expert."""
    experts = copy.deepcopy(experts_of(kind)).bfloat16()
    hidden, _, _ = inputs_of(experts)
    numbers = torch.arange(TOKENS) * (experts.num_experts - 1) // TOKENS
    numbers[-2:] = experts.num_experts + 1
    found = []
    for compute in (rows._grouped, rows._one_by_one):
        x = hidden.bfloat16().requires_grad_()
        out = compute(experts, x, numbers)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), [x, *experts.parameters()])])
    for own, other in zip(*found, strict=True):
        assert own.any() and torch.allclose(
            own.float(), other.float(), rtol=0.05, atol=0.05 * float(other.detach().abs().max())
        )
    assert not found[0][0][-2:].any() and not found[0][1][-2:].any()


def test_experts_are_grouped_on_a_device_alone(experts_of):
    experts = copy.deepcopy(experts_of("ernie4_5_moe")).bfloat16()
    assert not rows.is_grouped(experts)


@pytest.mark.parametrize("kind", by_default(KINDS, ("gpt_oss",)))
def test_no_bit_of_a_token_depends_on_the_tokens_beside_it(kind, experts_of):
    experts = experts_of(kind)
    hidden, chosen, gates = inputs_of(experts)

    def compute(count):
        whole = count + rows.missing_rows(count)
        return rows.experts(experts, *(x[torch.arange(whole) % count] for x in (hidden, chosen, gates)))[:count]

    with torch.no_grad(), rows.installed():
        every = compute(TOKENS)
        assert all(torch.equal(compute(count), every[:count]) for count in range(1, TOKENS))


def test_no_bit_of_a_product_depends_on_the_number_of_rows():
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(40, 70, generator=generator), torch.randn(33, 70, generator=generator)
    every, bias = rows.product(x, weight), torch.arange(33.0)
    assert torch.allclose(every, functional.linear(x, weight), atol=1e-5)
    assert all(torch.equal(rows.product(x[:count], weight), every[:count]) for count in range(1, 40))
    assert torch.equal(rows.product(x[None, 3:5], weight, bias), every[None, 3:5] + bias)


def test_products_are_replaced_inside_a_pass_alone():
    before = functional.linear
    with rows.installed():
        assert functional.linear is rows.product
    assert functional.linear is before


def test_a_pass_on_a_cpu_has_whole_vectors_and_on_cuda_its_own_rows(monkeypatch):
    assert [rows.missing_rows(n) % (32 * torch.get_num_threads()) for n in (0, 32 * torch.get_num_threads())] == [0, 0]
    assert rows.missing_rows(1) == 32 * torch.get_num_threads() - 1
    monkeypatch.setattr(rows.device, "has_cuda", lambda: True)
    assert rows.missing_rows(1) == 0


NORMS = {"granite": 0.0, "gemma2": 1.0, "phi": 0.0}  # type -> what its norms add to their weights


@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_exact_rollouts_compute_the_modules_formula_row_by_row(kind, monkeypatch):
    interpreted_kernels.use_one_unit(monkeypatch)
    module = any_types.small_module(kind, num_hidden_layers=1)
    norm = next(each for name, each in module.named_modules() if name.endswith("input_layernorm"))
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(6))
    wanted = norm(x)
    rows.use_row_norms(module)
    assert norm.forward.args[0].offset == NORMS[kind]
    found = norm(x)
    assert not torch.equal(x, found) and torch.allclose(found, wanted, atol=1e-5)
    assert all(torch.equal(norm(x[: n + 1]), found[: n + 1]) for n in range(6))


def test_what_is_no_known_norm_stays_as_it_is():
    module = any_types.small_module("cohere2", num_hidden_layers=1)
    rows.use_row_norms(module)  # Cohere's have a mean and no bias
    assert not any("forward" in vars(each) for each in module.modules())
