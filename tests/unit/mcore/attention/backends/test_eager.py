"""Softcap and sinks: against a softmax in float64, and with equal bits in training and rollout."""

import itertools

import pytest
import torch

from megarl.mcore.attention.backends import eager
from megarl.mcore.attention.packing import pack_sequences
from megarl.mcore.kernels import native as kernels
from tests.helpers.exactness import ROUNDING, sums_ignore_zeros
from tests.helpers.models.attention_inputs import (
    PagedRequests,
    assert_as_each_sequence_alone,
    module_of,
    needs_kernels,
    packed_attention,
    random_heads,
    score_options,
)
from tests.helpers.models.tiny_models import VOCAB, build
from tests.helpers.tiers import by_default
from tests.helpers.worlds import run_world

SINKS = torch.tensor([0.7, -1.5, 0.0, 2.0])
KINDS = {"softcap": (0.4, None), "sinks": (None, SINKS), "both": (0.4, SINKS), "neither": (None, None)}


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths, window", [([33, 2, 16, 17], None), ([3, 600, 40], None), ([100, 700], 530)], ids=str)
def test_output_and_gradients_of_the_compiled_kernels_are_those_of_this_backend(lengths, window, kind):
    softcap, sinks = KINDS[kind]
    weight, layout = (
        random_heads(sum(lengths), 4, torch.float32, 3),
        pack_sequences(torch.tensor(lengths), window=window),
    )
    found = []
    for backend in ("native", "eager"):
        inputs = [random_heads(sum(lengths), h, torch.float32, i).requires_grad_() for i, h in enumerate((4, 2, 2))]
        sink = None if sinks is None else sinks.clone().requires_grad_()
        trained = inputs if sinks is None else [*inputs, sink]
        out = packed_attention(0.8, backend, window, softcap, sink)(*inputs, None, packed_seq_params=layout)
        found.append([out.detach(), *torch.autograd.grad((out.view_as(weight) * weight).sum(), trained)])
    for ours, theirs in zip(*found, strict=True):
        assert theirs.abs().max() > 0 and (ours - theirs).abs().max() <= 1e-5 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("scores", [1, eager.MAX_SCORES])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths, window", [([33, 2, 16, 17], None), ([3, 12, 1, 40], 5)], ids=str)
def test_output_and_gradients_equal_those_of_each_sequence_alone(lengths, window, kind, scores, monkeypatch):
    monkeypatch.setattr(eager, "MAX_SCORES", scores)
    options = dict(zip(("softcap", "sinks"), KINDS[kind], strict=True))
    wanted = assert_as_each_sequence_alone(
        lengths, tolerance=5e-13, scale=0.8, backend="eager", window=window, **options
    )
    assert all(want.abs().max() > 0 for want in wanted)


MIXES = {
    "decode": [(1, 9), (1, 1), (1, 16), (1, 17)],
    "mixed": [(1, 12), (7, 7), (1, 33), (4, 4), (3, 11), (8, 16), (1, 170), (40, 40)],
    "long": [(1, 1400), (700, 700), (20, 1100), (1, 1)],
}


ROWS = list(itertools.product(MIXES, [None, 5, 530], KINDS, [4, 2, 1], ["eager", "native"]))
CHOSEN = [row for row in ROWS if row[0] != "long" or row[2:4] == ("both", 2)]


@pytest.mark.parametrize("mix, window, kind, groups, backend", by_default(ROWS, CHOSEN))
def test_paged_attention_has_the_bits_of_the_training_forward(mix, window, kind, groups, backend):
    if backend == "native" and not kernels.is_built():
        pytest.skip("no compiled kernels: no C++ compiler, or CUDA")
    softcap, sinks = KINDS[kind]
    requests = PagedRequests(MIXES[mix], 16, 4, groups, 4)
    out = requests.attend(window=window, backend=module_of(backend), **score_options(softcap, sinks))
    packed = requests.packed(window, backend=backend, softcap=softcap, sinks=sinks)
    is_exact = backend == "native" or sums_ignore_zeros(530) or window == 5 or mix != "long"
    assert (out - packed).abs().max() <= (0.0 if is_exact else ROUNDING)
    assert (out - requests.expected(window=window, softcap=softcap, sinks=sinks)).abs().max() <= 1e-5


def test_a_query_in_bf16_has_the_same_bits_whatever_is_beside_it():
    """One of some thousand products shows torch's other kernel for small ones; of this seed on an AMD EPYC."""
    generator = torch.Generator().manual_seed(147)
    query, key, value = (torch.randn(6, heads, 16, 16, generator=generator).bfloat16() for heads in (2, 1, 1))
    mask = torch.ones(16, 16, dtype=torch.bool).tril()[None, None]
    whole = eager.attend(query, key, value, mask, None, 0.4, None)
    alone = eager.attend(query[:1, :, 12:], key[:1], value[:1], mask[:, :, 12:], None, 0.4, None)
    assert whole.dtype == torch.bfloat16 and torch.equal(alone, whole[:1, :, 12:])


def logprobs(rank: int, softmax: str):
    from megarl.mcore.model.forward_pass import token_scores

    model, *_ = build(f"--softmax-type {softmax}")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("softmax_offset"):
                parameter.zero_()
    tokens, lengths = torch.arange(12) % VOCAB, torch.tensor([5, 7])
    return token_scores(model, tokens, lengths, 1.0, VOCAB).logprobs.detach()


def test_off_by_one_is_a_softmax_with_sinks_of_zero():
    off_by_one, learnable, vanilla = (
        run_world(logprobs, 1, kind)[0] for kind in ("off-by-one", "learnable", "vanilla")
    )
    assert torch.equal(off_by_one, learnable) and (off_by_one - vanilla).abs().max() > 1e-4
