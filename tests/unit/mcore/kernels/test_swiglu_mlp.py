"""The SwiGLU MLP: Megatron's results with less memory for backward."""

import pytest
import torch
from megatron.core.transformer.mlp import MLP
from torch.testing import assert_close

from megarl.mcore.kernels import native
from tests.helpers.tiny_models import build
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
