"""Sliding windows: against a masked softmax in float64, and with equal bits in training and rollout."""

import numpy as np
import pytest
import torch

from megarl.mcore.attention.backends import sdpa
from megarl.mcore.attention.packing import pack_sequences
from megarl.mcore.attention.segments import FULL, KEY_BLOCK, WINDOW, cut_segments, kind_of_layer
from tests.helpers.exactness import ROUNDING, sums_ignore_zeros
from tests.helpers.models.attention_inputs import (
    PagedRequests,
    exact_attention,
    module_of,
    needs_kernels,
    packed_attention,
    random_heads,
)

LONG = [1300, 3, 700]
BACKENDS = ["sdpa", pytest.param("native", marks=needs_kernels)]


@pytest.mark.parametrize("window", [1, 3, 16, 17])
@pytest.mark.parametrize("lengths", [[1], [33, 2, 16, 17], [3, 12, 1, 40]], ids=str)
def test_packed_attention_equals_a_masked_softmax(lengths, window):
    check_packed(lengths, window, torch.float64, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 40, 600])
def test_long_sequences_are_cut_and_stay_the_same(window, backend):
    check_packed(LONG, window, torch.float32, 1e-5, backend)


def check_packed(lengths, window, dtype, tolerance, backend="sdpa"):
    """Output and gradients of a packed micro-batch against each sequence alone."""
    inputs = [random_heads(sum(lengths), h, dtype, i).requires_grad_() for i, h in enumerate((4, 2, 2))]
    weight = random_heads(sum(lengths), 4, dtype, 3)
    layout = pack_sequences(torch.tensor(lengths), window=window)
    attend = packed_attention(window=window, backend=backend)
    packed = attend(*inputs, None, packed_seq_params=layout).view_as(weight)
    gradients = torch.autograd.grad((packed * weight).sum(), inputs)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    parts = zip(*(x.split(lengths) for x in exact), strict=True)
    expected = torch.cat([exact_attention(*part, window=window) for part in parts])
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    assert (packed - expected).abs().max() <= tolerance
    for gradient, want in zip(gradients, wanted, strict=True):
        assert (gradient - want).abs().max() <= tolerance * max(1.0, float(want.abs().max()))


def test_sequences_within_the_window_cost_nothing():
    layout = pack_sequences(torch.tensor([33, 2, 16]), window=33)
    assert all(one is other for one, other in zip(layout.attention[FULL].batches, layout.attention[WINDOW].batches))
    longer = pack_sequences(torch.tensor([33, 2, 16]), window=32)
    masked = [batch.mask is not None for batch in longer.attention[WINDOW].batches]
    assert sum(masked) == 1 and all(batch.mask is None for batch in longer.attention[FULL].batches)


MIXES = {
    "decode": [(1, 9), (1, 1), (1, 16), (1, 17)],
    "mixed": [(1, 12), (7, 7), (1, 33), (4, 4), (3, 11), (8, 16)],
    "long": [(1, 1400), (1, 3), (700, 700), (1, 600), (20, 1100), (1, 1)],
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("window", [1, 5, 16, 530])
@pytest.mark.parametrize("heads, groups", [(4, 2), (4, 4)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_paged_attention_has_the_bits_of_the_training_forward(mix, window, heads, groups, backend):
    requests = PagedRequests(MIXES[mix], 16, heads, groups, 4)
    out = requests.attend(window=window, backend=module_of(backend))
    is_exact = backend == "native" or sums_ignore_zeros(530) or window != 530
    assert (out - requests.packed(window, backend=backend)).abs().max() <= (0.0 if is_exact else ROUNDING)
    assert (out - requests.expected(window=window)).abs().max() <= 1e-5


def test_decodes_read_about_one_window():
    requests = PagedRequests([(1, 5000), (1, 40), (1, 2100)], 16, 4, 2, 5)
    reads = sdpa.plan_cache_reads(requests.requests(100))
    # 2,100 keys, of which the last 100 are seen: three whole blocks of 512 are not read.
    assert [part.mask.shape[-1] for part in reads.decodes] == [576]
    assert max((part.mask == 0).sum(-1).max() for part in reads.decodes) == 100


def test_pieces_cover_every_query_with_all_keys_it_sees():
    queries, keys, window = np.array([3000, 1, 700, 5]), np.array([3000, 3000, 1900, 5]), 600
    segment, offset, counts, ends, unseen = cut_segments(queries, keys, window)
    first = keys[segment] - queries[segment] + offset  # position of the first query
    for i in range(len(queries)):
        covered = np.concatenate([np.arange(f, f + n) for f, n in zip(first[segment == i], counts[segment == i])])
        assert covered.tolist() == list(range(keys[i] - queries[i], keys[i]))
    assert (ends == first + counts).all() and (unseen <= (first + 1 - window).clip(min=0)).all()
    assert (unseen % KEY_BLOCK == 0).all() and (ends - unseen <= 2 * (2 * KEY_BLOCK)).all()


def test_layers_have_the_kinds_of_megatron():
    def kinds(freq, size=(3, 0)):
        config = packed_attention().config
        config.window_size, config.window_attn_skip_freq = size, freq
        return [kind_of_layer(config, number) for number in range(1, 7)]

    assert kinds(None) == [WINDOW] * 6 and kinds(3, None) == [FULL] * 6
    assert kinds(3) == [WINDOW, WINDOW, FULL] * 2 and kinds([1, 0, 0, 1, 1, 0]) == [1, 0, 0, 1, 1, 0]
