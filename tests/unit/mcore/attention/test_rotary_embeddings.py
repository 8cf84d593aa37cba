"""Rotary frequencies: those of transformers 5.23 (`ROPE_INIT_FUNCTIONS`), and what layers with and without a window
get of them. Rotation in training: the bits of Megatron's operators and gradients, by each kernel."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from megarl.arguments import parse
from megarl.mcore.attention import rotary_embeddings
from megarl.mcore.attention.rotary_embeddings import Rotary, Rotation, concentration, kinds, of_kind
from megarl.mcore.attention.segments import FULL, WINDOW
from megarl.mcore.config.megatron_flags import transformer_config
from megarl.mcore.kernels import native
from megarl.mcore.kernels.cuda.rotate_heads import HEAD_TILE, rotate_heads

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --max-prompt-length 5"
    " --max-response-length 6 --rotary-base 12345.5"
)
YARN = "--position-embedding-type yarn --rotary-scaling-factor 6 --yarn-original-max-position-embeddings 64"

# Flags, and transformers' frequencies per position and factor of cosines and sines, of 16 channels and base 12345.5.
TRANSFORMERS = {
    "llama3": (
        "--use-rope-scaling --rope-scaling-factor 6 --rope-low-freq-factor 2 --rope-high-freq-factor 7"
        " --rope-original-max-position-embeddings 64",
        [1.0, 0.10971944034099579, 0.01581144519150257, 0.004870045464485884, 0.001500010839663446,
         0.0004620147228706628, 0.00014230403758119792, 4.383072882774286e-05], 1.0,
    ),
    "yarn": (
        f"{YARN} --yarn-beta-fast 12 --yarn-beta-slow 2",
        [1.0, 0.17967107892036438, 0.01581144519150257, 0.004870045464485884, 0.001500010839663446,
         0.00046201475197449327, 0.00014230405213311315, 4.383072518976405e-05], 1.1791759469228056,
    ),
    "yarn, with equal betas": (  # as published for Kimi-K2
        f"{YARN} --yarn-beta-fast 1 --yarn-beta-slow 1",
        [1.0, 0.3080075681209564, 0.01581144519150257, 0.004870045464485884, 0.001500010839663446,
         0.00046201475197449327, 0.00014230405213311315, 4.383072518976405e-05], 1.1791759469228056,
    ),
    "yarn, not rounded, with mscale": (
        f"{YARN} --no-yarn-correction-range-round-to-int --mscale 0.8 --mscale-all-dim 0.6",
        [1.0, 0.1777769774198532, 0.01581144519150257, 0.004870045464485884, 0.001500010839663446,
         0.00046201475197449327, 0.00014230405213311315, 4.383072518976405e-05], 1.0323566674651592,
    ),
    "longrope": (
        "--rotary-divisors 1,1.1,1.3,1.6,2,2.5,3,4 --rotary-attention-factor 1.2",
        [1.0, 0.28000688552856445, 0.07297590374946594, 0.018262669444084167, 0.004500032402575016,
         0.0011088353348895907, 0.0002846081042662263, 6.574609142262489e-05], 1.2,
    ),
    "linear": (
        "--rotary-seq-len-interpolation-factor 2.5",
        [0.4000000059604645, 0.12320302426815033, 0.03794746845960617, 0.011688108555972576, 0.0036000260151922703,
         0.0011088353348895907, 0.0003415296960156411, 0.00010519374336581677], 1.0,
    ),
}  # fmt: skip


def rotary_of(flags: str):
    args = parse(f"{MODEL} {flags}".split(), 1, "sft").roles["actor"].megatron
    config = transformer_config(args)
    return Rotary(args, config), config


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_frequencies_are_those_of_transformers(case):
    flags, expected, factor = TRANSFORMERS[case]
    rotary, config = rotary_of(flags)
    positions = torch.arange(300)
    angles = torch.outer(positions.double(), torch.tensor(expected, dtype=torch.float64))
    found = rotary(300)
    assert found.shape == (300, 1, 1, 16) and found.dtype == torch.float32
    assert ((found[:, 0, 0] - angles.repeat(1, 2)).abs() <= 3e-7 * angles.repeat(1, 2).abs()).all()
    assert kinds(config) == (FULL,)
    assert [concentration(config, kind) for kind in (FULL, WINDOW)] == pytest.approx([factor] * 2, rel=1e-12)


def test_layers_with_a_window_may_have_a_base_of_their_own_without_scaling():
    rotary, config = rotary_of(f"{YARN} --window-size 3,0 --window-rotary-base 500.5")
    alone, _ = rotary_of(YARN)
    plain, _ = rotary_of("--rotary-base 500.5")
    both = rotary(40)
    assert kinds(config) == (FULL, WINDOW) and both.shape == (40, 1, 1, 32)
    assert torch.equal(of_kind(both, config, FULL), alone(40))
    assert torch.equal(of_kind(both, config, WINDOW), plain(40))
    assert concentration(config, WINDOW) == 1.0 < concentration(config, FULL)


@pytest.mark.parametrize("flags", ["", "--rotary-percent 0.5", "--use-rope-scaling --rope-scaling-factor 32"])
def test_other_frequencies_are_megatrons_to_the_bit(flags):
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    rotary, _ = rotary_of(flags)
    theirs = RotaryEmbedding(
        16, 0.5 if "percent" in flags else 1.0, rotary_base=12345.5, rope_scaling="scaling" in flags,
        rope_scaling_factor=32.0, use_cpu_initialization=True,
    )  # fmt: skip
    assert torch.equal(rotary(500), theirs(500))


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
        monkeypatch.setattr(rotary_embeddings, "_rotated_heads", rotate_heads)
    heads, groups, channels, rotated = case
    frequencies = 40 * torch.rand(3, 1, rotated // 2)
    frequencies, factor = torch.cat([frequencies, frequencies], -1)[torch.tensor([2, 0, 1, 0])], 1.2
    given = torch.randn(4, heads, channels).to(dtype), torch.randn(4, groups, 2, channels).to(dtype)[:, :, 1]
    grads = torch.randn(4, heads, channels).to(dtype), torch.randn(channels, 4, groups).to(dtype).permute(1, 2, 0)
    own, other = ([x.detach().requires_grad_() for x in given] for _ in range(2))
    found = rotary_embeddings.rotated_heads(*own, *Rotation.of(frequencies, dtype, factor))
    expected = [_apply_rotary_pos_emb_bshd(x, frequencies, mscale=factor) for x in other]
    torch.autograd.backward(found, grads)
    torch.autograd.backward(expected, grads)
    assert not torch.equal(found[0], given[0]) and not torch.equal(own[1].grad, grads[1])
    for x, y, mine, wanted in zip(own, other, found, expected, strict=True):
        assert mine.is_contiguous() and torch.equal(mine, wanted) and torch.equal(x.grad, y.grad)


@pytest.mark.parametrize("width", [8, 4])
def test_rotary_embedding_equals_megatrons_to_the_bit(width):
    generator = torch.Generator().manual_seed(1)
    frequencies = torch.randn(20, 1, 1, width, generator=generator)
    heads, positions = torch.randn(7, 2, 3, 8, generator=generator), torch.tensor([0, 19, 4, 4, 7, 1, 12])
    turned = heads.clone()
    Rotation.of(frequencies, torch.float32).at(positions).apply_(turned)
    wanted = _apply_rotary_pos_emb_bshd(heads, frequencies[positions])
    assert torch.equal(turned, wanted) and not torch.equal(turned, heads)
