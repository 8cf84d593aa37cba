"""The SwiGLU MLP: Megatron's results with less memory for backward. Grouped products of experts: the results and
gradients of one product after another."""

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from torch.testing import assert_close

from megarl.mcore.kernels import native
from megarl.mcore.kernels.swiglu import grouped_swiglu, stack_, stack_of, stacked_swiglu
from tests.helpers.models.tiny_models import build
from tests.helpers.worlds import run_world


def both_ways(rank, flags, dtype):
    """Output and gradients of a layer's block and of Megatron's own forward on the same weights, and whether a pass
    without gradients gives the same bits."""
    model, _, _ = build(flags, "llama")
    block = model.decoder.layers[0].mlp.to(dtype)
    hidden = torch.randn(37, 1, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = []
    for forward in (type(block).forward, MLP.forward):
        x = hidden.clone().requires_grad_()
        out, bias = forward(block, x)
        assert bias is None
        wanted = [x, *(w for w in block.parameters())]
        found.append((out.detach(), torch.autograd.grad(out.float().square().sum(), wanted)))
    with torch.no_grad():
        silent, _ = block(hidden)
    return [type(block).__name__, found, torch.equal(silent, found[0][0])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_swiglu_mlp_equals_megatrons(dtype):
    name, ((out, grads), (wanted, wanted_grads)), same = run_world(both_ways, 1, "", dtype)[0]
    assert name == "SwiGLUMLP" and same
    if dtype is torch.float32 and native.is_used():  # another exp
        assert_close(out, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
    else:
        assert torch.equal(out, wanted)
    for grad, other in zip(grads, wanted_grads, strict=True):
        scale = float(other.abs().max())
        assert_close(grad, other, rtol=0, atol=scale * (3e-2 if dtype is torch.bfloat16 else 1e-6))


def kept_bytes(rank):
    """Bytes that autograd keeps between forward and backward, with megarl's block and with Megatron's."""
    model, _, _ = build("", "llama")
    block, sizes = model.decoder.layers[0].mlp, []
    for forward in (type(block).forward, MLP.forward):
        held, x = {}, torch.randn(64, 1, model.config.hidden_size, requires_grad=True)

        def keep(tensor, held=held):
            held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out, _ = forward(block, x)  # held until here: storage of what is gone would be counted once more
        sizes.append(sum(held.values()))
    return sizes


def test_it_saves_less_for_backward():
    ours, theirs = run_world(kept_bytes, 1)[0]
    assert ours < 0.8 * theirs


# -- experts -------------------------------------------------------------------------------------------------------

COUNTS, HIDDEN, WIDTH = torch.tensor([3, 0, 7, 1, 9]), 64, 32
ENDS = COUNTS.cumsum(0).int()


def inputs(dtype):
    """(rows, gates, first weights, second weights) that want gradients."""
    generator, total = torch.Generator().manual_seed(0), int(COUNTS.sum())

    def drawn(*shape):
        return torch.randn(*shape, generator=generator).mul(0.3).to(dtype).requires_grad_()

    first, second = (
        [torch.nn.Parameter(drawn(*shape)) for _ in COUNTS] for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    )
    return drawn(total, HIDDEN), drawn(total), first, second


@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_equal_the_products_of_each_expert(dtype, is_stacked):
    rows, gates, first, second = inputs(dtype)
    wanted = [rows, gates, *first, *second]
    weight = torch.linspace(-1, 1, rows.numel()).view_as(rows).to(dtype)
    one_by_one = grouped_swiglu(rows, gates, COUNTS.tolist(), first, second)
    expected = torch.autograd.grad((one_by_one * weight).sum(), wanted)
    if is_stacked:
        stack_(first)
        stack_(second)
    together = stacked_swiglu(rows, gates, ENDS, first, second)
    found = torch.autograd.grad((together * weight).sum(), wanted)
    with torch.no_grad():
        plain = stacked_swiglu(rows, gates, ENDS, first, second)
    bound = 1e-5 if dtype is torch.float32 else 2**-7
    assert torch.equal(plain, together)
    for one, other in zip((together, *found), (one_by_one, *expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=bound * float(other.detach().abs().max().clamp(min=1e-3)))


def test_a_stack_is_a_view_where_weights_lie_at_equal_distances():
    _, _, first, _ = inputs(torch.float32)
    values = [weight.detach().clone() for weight in first]
    assert stack_of(first).data_ptr() != first[0].data_ptr()
    stack_(first)
    assert stack_of(first).data_ptr() == first[0].data_ptr() and torch.equal(stack_of(first), torch.stack(values))
    buffer = torch.randn(5 * 3, 2 * WIDTH, HIDDEN)  # of several weights a layer
    spread = [torch.nn.Parameter(buffer[3 * i + 1]) for i in range(5)]
    assert stack_of(spread).data_ptr() == buffer[1].data_ptr() and torch.equal(stack_of(spread), buffer[1::3])
    backwards = spread[::-1]
    assert torch.equal(stack_of(backwards), buffer[1::3].flip(0))


@pytest.mark.parametrize("trains", [False, True])
def test_a_single_row_may_be_part_of_a_wider_one(trains):
    _, _, first, second = inputs(torch.bfloat16)
    wide, ends = torch.randn(1, HIDDEN + 1).bfloat16(), torch.tensor([0, 0, 1, 1, 1], dtype=torch.int32)
    with torch.set_grad_enabled(trains):
        found = stacked_swiglu(wide[:, :-1], wide[:, -1], ends, first, second)
        expected = stacked_swiglu(wide[:, :-1].clone(), wide[:, -1], ends, first, second)
    assert torch.equal(found, expected) and found.any()


def test_rows_after_the_last_expert_change_nothing():
    rows, gates, first, second = inputs(torch.bfloat16)
    ends = ENDS.clamp(max=15)
    with torch.no_grad():
        found = stacked_swiglu(rows, gates, ends, first, second)[:15]
        expected = stacked_swiglu(rows[:15], gates[:15], ends, first, second)
    assert torch.equal(found, expected)
