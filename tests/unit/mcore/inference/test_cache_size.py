"""What a number of GiB of the cache holds."""

from types import SimpleNamespace

import pytest

from megarl.errors import UsageError
from megarl.mcore.inference.cache_size import cache_bytes, capacity_of, check_capacity, snapshot_count


def test_states_that_the_buffer_does_not_hold():
    assert cache_bytes(0.5, 100, 2**20) == 2**29 - 100 * 2**20
    with pytest.raises(UsageError, match=r"--rollout-buffer-gb 0.5 .*: the states of 600 requests .* take 0.586 GiB"):
        cache_bytes(0.5, 600, 2**20)
    with pytest.raises(
        UsageError, match=r"states of 300 requests \(--…-max-requests\) and 300 ends of prompts \(--rol"
    ):
        cache_bytes(0.5, 300, 2**20, 300)


@pytest.mark.parametrize("size, capacity", [(100, 4 * 8), (99, 3 * 8), (20, 8), (1, 8)])
def test_a_cache_has_whole_blocks_and_one_for_padding(size, capacity):
    assert capacity_of(size * 8, bytes_of_token=5 * 4, block_tokens=8) == capacity


def test_a_cache_holds_the_longest_sequence_or_is_refused():
    settings = SimpleNamespace(max_prompt_length=60, max_response_length=40, rollout_buffer_gb=0.5)
    check_capacity(settings, 100)
    with pytest.raises(UsageError, match=r"holds one sequence of 99 tokens; .* is 100"):
        check_capacity(settings, 99)


@pytest.mark.parametrize("caching, wanted, count", [(False, 5, 0), (True, 5, 5), (True, None, 16), (True, 0, 0)])
def test_snapshots_are_as_many_as_requests_unless_a_flag_says(caching, wanted, count):
    assert snapshot_count(16, caching, wanted) == count
