"""Attention by the compiled kernels: results and gradients of PyTorch's attention, for packed batches of any form."""

import pytest
import torch
from torch.testing import assert_close

from megarl.batch import SharedPrefix
from megarl.mcore.attention import native_attention
from megarl.mcore.attention.backends import eager, sdpa
from megarl.mcore.attention.packing import pack_sequences
from megarl.mcore.attention.segments import FULL
from megarl.mcore.kernels import native as kernels

pytestmark = pytest.mark.skipif(not kernels.is_built(), reason="no compiled kernels: no C++ compiler, or CUDA")


def inputs(tokens, heads, groups, channels):
    generator = torch.Generator().manual_seed(5)
    sizes = (heads, groups, groups)
    return [torch.randn(tokens, n, channels, generator=generator).requires_grad_() for n in sizes]


@pytest.mark.parametrize(("heads", "groups", "channels"), [(4, 2, 16), (6, 1, 48), (3, 3, 64), (8, 2, 80), (2, 2, 128),
                                                            (4, 2, 20)])  # fmt: skip
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_outputs_and_gradients_are_those_of_sdpa(heads, groups, channels, shares, scale):
    lengths, shared = torch.tensor([40, 1, 17, 39, 70, 44]), None
    if shares:  # of short and of long remainders: causal segments and masked ones
        shared = SharedPrefix(torch.tensor([0, 1, 2, 0, 4, 0]), torch.tensor([0, 0, 0, 36, 0, 5]))
    layout = pack_sequences(lengths, shared=shared)
    tensors, found = inputs(len(layout.positions), heads, groups, channels), []
    pull = torch.randn(len(layout.positions), heads, channels, generator=torch.Generator().manual_seed(6))
    for backend in (native_attention, sdpa):
        out = backend.packed_attention(*tensors, layout.attention[FULL], scale)
        found.append([out.detach(), *torch.autograd.grad(out, tensors, pull)])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    with torch.no_grad():
        assert torch.equal(native_attention.packed_attention(*tensors, layout.attention[FULL], scale), found[0][0])


def test_heads_of_any_strides_are_read_in_place():
    layout = pack_sequences(torch.tensor([9, 20]))
    query, key, value = (x.detach() for x in inputs(29, 4, 2, 16))
    grouped = torch.cat([query.unflatten(1, (2, 2)), key.unsqueeze(2), value.unsqueeze(2)], dim=2)  # as a model's heads
    views = grouped[:, :, :2].flatten(1, 2), grouped[:, :, 2], grouped[:, :, 3]
    wanted = native_attention.packed_attention(query, key, value, layout.attention[FULL], None)
    assert torch.equal(native_attention.packed_attention(*views, layout.attention[FULL], None), wanted)


def test_scores_of_any_size_give_finite_weights():
    layout = pack_sequences(torch.tensor([33]))
    query, key, value = (x.detach() for x in inputs(33, 2, 1, 16))
    out = native_attention.packed_attention(1e4 * query, 1e4 * key, value, layout.attention[FULL], None)
    wanted = sdpa.packed_attention(1e4 * query, 1e4 * key, value, layout.attention[FULL], None)
    assert out.isfinite().all() and torch.equal(out, wanted)  # each row takes one value


def test_models_that_the_kernels_do_not_compute_take_another_backend():
    from megarl.mcore.attention import backends
    from tests.helpers.models.attention_inputs import packed_attention

    config = packed_attention().config
    for channels, window, softcap in ((16, None, None), (8, None, None), (16, (3, 0), None), (16, None, 5.0)):
        config.kv_channels, config.window_size, config.attn_logit_softcapping = channels, window, softcap
        other = sdpa if softcap is None else eager
        for dtype, is_on, backend in (
            (torch.float32, True, native_attention), (torch.bfloat16, True, other), (torch.float32, False, other),
        ):  # fmt: skip
            config.params_dtype = dtype
            kernels.enable(is_on)
            try:
                assert backends.load(config) is backend
            finally:
                kernels.enable(True)
