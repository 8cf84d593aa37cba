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
    assert_as_each_sequence_alone,
    module_of,
    needs_kernels,
    packed_attention,
)

LONG = [1300, 3, 700]
BACKENDS = ["sdpa", pytest.param("native", marks=needs_kernels)]


@pytest.mark.parametrize("window", [1, 3, 16, 17])
@pytest.mark.parametrize("lengths", [[1], [33, 2, 16, 17], [3, 12, 1, 40]], ids=str)
def test_packed_attention_equals_a_masked_softmax(lengths, window):
    assert_as_each_sequence_alone(lengths, window=window)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [1, 40, 600])
def test_long_sequences_are_cut_and_stay_the_same(window, backend):
    assert_as_each_sequence_alone(LONG, dtype=torch.float32, tolerance=1e-5, backend=backend, window=window)


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
