"""Latent attention by rows, interpreted: attention and gradients of autograd, in any parts; models compute with it what
they compute on a CPU."""

import pytest
import torch

from megarl.mcore.attention import latent_rows
from megarl.mcore.attention.latent_rows import RowReads, row_attention
from tests.helpers.folders.trained_folders import gradients
from tests.helpers.models.attention_inputs import needs_kernels
from tests.helpers.models.reference_kernels import pack_bits
from tests.helpers.worlds import run_world

COUNT, WIDTH, TURNED = 4, 20, 6


def pieces(generator) -> list[tuple[torch.Tensor, ...]]:
    """A segment of seven queries, whose first ones see few keys; and two decodes with rows of their own."""
    tokens = torch.randperm(10, generator=generator)
    one = tokens[:7], torch.randperm(40, generator=generator)[None, :7], torch.zeros(7, dtype=torch.int64)
    own = torch.stack([torch.randperm(40, generator=generator)[:9] for _ in range(2)])
    return [(*one, torch.arange(1, 8)), (tokens[7:9], own, torch.arange(2), torch.tensor([9, 3]))]


def choice_of(reads: RowReads, scores: torch.Tensor) -> list[torch.Tensor]:
    """Bits of the keys with the largest scores [T, K] of each query."""
    found = []
    for tokens, _, _, seen, width in reads.parts:
        own = scores[tokens, :width].masked_fill(torch.arange(width) >= seen[:, None], -1)
        best = own >= own.topk(min(COUNT, width)).values[:, -1:]
        found.append(pack_bits(best & (own >= 0)))
    return found


@pytest.mark.parametrize("chooses", [True, False])
def test_attention_and_gradients_are_those_of_autograd_in_any_parts(chooses, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    asked, scores = pieces(generator), torch.rand(10, 9, generator=generator)
    query = torch.randn(10, 3, WIDTH + TURNED, generator=generator, requires_grad=True)
    latents = torch.randn(40, WIDTH + TURNED, generator=generator, requires_grad=True)
    upward, found = torch.randn(10, 3, WIDTH, generator=generator), []
    for queries, gathered in ((512, 64), (2, 1)):
        monkeypatch.setattr(latent_rows, "QUERIES", queries)
        monkeypatch.setattr(latent_rows, "GATHERED", gathered)
        reads = RowReads(asked, COUNT)
        assert len(reads.parts) == (1 if queries > 9 else 5) and reads.is_long
        choice = choice_of(reads, scores) if chooses else None
        out = row_attention(query, latents, WIDTH, reads, choice, 0.3)
        found.append((out, *torch.autograd.grad((out * upward).sum(), (query, latents))))
    assert torch.equal(found[0][0], found[1][0])
    outs = [torch.zeros(3, WIDTH)] * 10
    for tokens, keys, segments, seen in asked:
        for token, segment, count in zip(tokens.tolist(), segments.tolist(), seen.tolist(), strict=True):
            own = keys[segment, :count]
            if chooses:
                own = own[scores[token, :count].topk(min(COUNT, count)).indices]
            weights = (query[token] @ latents[own].t() * 0.3).softmax(-1)
            outs[token] = weights @ latents[own][:, :WIDTH]
    wanted = torch.stack(outs)
    for part in found:
        for one, other in zip(part, (wanted, *torch.autograd.grad((wanted * upward).sum(), (query, latents),
                                                                  retain_graph=True)), strict=True):  # fmt: skip
            assert (one - other).abs().max() < 1e-5 * max(1, other.abs().max())


def by_rows(rank, flags: str) -> list[tuple]:
    """(log-probs, gradients, disagreement) of a micro-batch on a CPU, by rows, and as in an exact rollout."""
    import torch.distributed as dist

    from megarl.mcore.model import latent_attention, sparse_attention
    from tests.helpers.models.tiny_models import VOCAB, build

    model, *_ = build(f"--num-layers 1 {flags}", "latent")
    rows, found = [[(7 * i + j) % VOCAB for i in range(length)] for j, length in enumerate((17, 5))], []
    for patched in ({}, {"_uses_rows": lambda *_: True}, {"is_exact": lambda _: True}):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in patched.items():
                owners = (latent_attention, sparse_attention)
                for owner in owners if name == "is_exact" else (sparse_attention.SparseLatentAttention,):
                    patch.setattr(owner, name, value)
            logprobs, grads, _ = gradients([model], VOCAB, rows)
        missed = sparse_attention.take_disagreement([model], 1, dist.group.WORLD)
        found.append((logprobs, grads, missed))
    return found


@needs_kernels
@pytest.mark.parametrize("name", ["latents", "chosen keys"])
def test_a_model_computes_what_it_does_on_a_cpu(name):
    """Of latents without a choice the last one alone differs: its forward pass has other kernels than its backward."""
    from tests.helpers.models.tiny_models import CHOOSING

    ((wanted, *others),) = run_world(by_rows, 1, CHOOSING if name == "chosen keys" else "")
    assert len(wanted[2]) == (2 if name == "chosen keys" else 0) and all(0 < x < 1 for x in wanted[2].values())
    assert not torch.equal(wanted[0], others[1][0])
    for logprobs, grads, missed in others:
        assert (logprobs - wanted[0]).abs().max() < 1e-5 and missed == pytest.approx(wanted[2], rel=1e-4)
        assert grads.keys() == wanted[1].keys() and len(grads) > 12
        for key, grad in grads.items():
            assert (grad - wanted[1][key]).abs().max() < 1e-4 * wanted[1][key].abs().max(), key
