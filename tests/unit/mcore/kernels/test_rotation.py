"""Rotation in training: the bits of Megatron's operators and gradients, by each kernel."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from megarl.mcore.kernels import native, rotation
from megarl.mcore.kernels.cuda.rotate_heads import HEAD_TILE, rotate_heads
from megarl.mcore.model.decoder_layer import Rotation

CASES = {  # H, G, D, rotated channels
    "grouped queries": (6, 2, 16, 16),
    "heads of several programs": (HEAD_TILE + 3, HEAD_TILE + 3, 32, 32),
    "some channels": (4, 1, 24, 8),
    "odd number of pairs": (2, 2, 20, 10),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter cuts numbers to bf16
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("kernels", ["cuda", "cpu", "operators"])
def test_it_has_the_bits_of_megatrons_operators(case, dtype, kernels, monkeypatch):
    """Of queries in memory of their own and keys between others, as attention has them; and with YaRN's factor."""
    monkeypatch.setattr(native, "_is_enabled", kernels == "cpu")
    if kernels == "cuda":
        monkeypatch.setattr(rotation, "_rotated_heads", rotate_heads)
    heads, groups, channels, rotated = case
    frequencies = 40 * torch.rand(3, 1, rotated // 2)
    frequencies, factor = torch.cat([frequencies, frequencies], -1)[torch.tensor([2, 0, 1, 0])], 1.2
    given = torch.randn(4, heads, channels).to(dtype), torch.randn(4, groups, 2, channels).to(dtype)[:, :, 1]
    grads = torch.randn(4, heads, channels).to(dtype), torch.randn(channels, 4, groups).to(dtype).permute(1, 2, 0)
    own, other = ([x.detach().requires_grad_() for x in given] for _ in range(2))
    found = rotation.rotated_heads(*own, *Rotation.of(frequencies, dtype, factor))
    expected = [_apply_rotary_pos_emb_bshd(x, frequencies, mscale=factor) for x in other]
    torch.autograd.backward(found, grads)
    torch.autograd.backward(expected, grads)
    assert not torch.equal(found[0], given[0]) and not torch.equal(own[1].grad, grads[1])
    for x, y, mine, wanted in zip(own, other, found, expected, strict=True):
        assert mine.is_contiguous() and torch.equal(mine, wanted) and torch.equal(x.grad, y.grad)
