"""Adam with moments of 16 bits: the moments of torch's, rounded after each update; memory; loading."""

import copy

import pytest
import torch

from megarl.mcore.config.optimizer_flags import MAX_BETA_BF16

SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}
SHAPES = [(64, 16), (16,), (), (0, 16), (3, 16, 2), (160,)]
BF16, FP32 = torch.bfloat16, torch.float32


def small(parameters, first=BF16, second=BF16, **more):
    from megarl.mcore.training.adam import SmallMomentsAdam

    return SmallMomentsAdam(parameters, **SETTINGS | more, moments={"exp_avg": first, "exp_avg_sq": second})


def parameters(generator=None) -> list:
    generator = generator or torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


@pytest.mark.parametrize("piece", [2**24, 48])  # elements: all at once; rows, and parts of the vector of 160
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("first, second", [(BF16, BF16), (BF16, FP32), (FP32, BF16)])
def test_an_update_is_torchs_with_rounded_moments(first, second, decoupled, piece, monkeypatch):
    from megarl.mcore.training import adam

    monkeypatch.setattr(adam, "PIECE", piece)
    generator = torch.Generator().manual_seed(0)
    ours = parameters(generator)
    theirs = [p.detach().clone().requires_grad_() for p in ours]
    one = small(ours, first, second, adam_w_mode=decoupled)
    other = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **SETTINGS, fused=True)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        one.step()
        other.step()
        for p, q in zip(ours, theirs, strict=True):
            for name, dtype in (("exp_avg", first), ("exp_avg_sq", second)):
                other.state[q][name] = other.state[q][name].to(dtype).float()
                assert one.state[p][name].dtype == dtype
                assert torch.equal(one.state[p][name].float(), other.state[q][name])
            assert torch.equal(p, q)


def test_a_piece_has_a_bounded_size_and_every_element_is_in_one(monkeypatch):
    from megarl.mcore.training import adam

    monkeypatch.setattr(adam, "PIECE", 48)
    columns = [[torch.arange(p.numel()).view(p.shape) + 1000 * i for i, p in enumerate(parameters())] for _ in range(2)]
    pieces = list(adam.pieces(*columns))
    assert len(pieces) > 20 and all(sum(t.numel() for t in first) <= 48 for first, _ in pieces)
    assert all(torch.equal(a, b) for first, second in pieces for a, b in zip(first, second, strict=True))
    found = torch.cat([t.flatten() for first, _ in pieces for t in first])
    assert torch.equal(found, torch.cat([t.flatten() for t in columns[0]]))


@pytest.mark.parametrize("source", ["small", "fp32"])
def test_loaded_moments_have_their_types(source):
    """torch gives a loaded state the type of its parameter. Moments of fp32 are rounded."""
    before, after = parameters(), parameters()
    saved = small(before) if source == "small" else small(before, FP32, FP32)
    for p in before:
        p.grad = torch.full_like(p, 0.3)
    saved.step()
    loaded = small(after)
    loaded.create_all_moments()
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    for p, q in zip(before, after, strict=True):
        for name, moment in loaded.state[q].items():
            assert moment.dtype == BF16
            assert torch.equal(moment, saved.state[p][name].to(BF16))


@pytest.mark.parametrize("beta, falls", [(0.999, False), (MAX_BETA_BF16, True)])
def test_a_moment_of_bf16_falls_with_the_allowed_betas_alone(beta, falls):
    """Why larger ones are refused: a second moment that once was large would stay so, without gradients, too."""
    weight = torch.zeros(128).requires_grad_()
    adam = small([weight], betas=(0.9, beta))
    adam.create_all_moments()
    adam.state[weight]["exp_avg_sq"].copy_(1 + torch.arange(128) / 128)  # all mantissas
    before = adam.state[weight]["exp_avg_sq"].clone()
    weight.grad = torch.zeros(128)
    adam.step()
    assert bool((adam.state[weight]["exp_avg_sq"] < before).all()) == falls
    assert falls or torch.equal(adam.state[weight]["exp_avg_sq"], before)
