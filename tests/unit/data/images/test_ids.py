"""Ids of image rows among tokens."""

import pytest

from megarl.data.images.ids import KEY_BITS, MAX_ROWS, image_ids, key_of, row_of


@pytest.mark.parametrize("key", [1, 2, 12345, 2**KEY_BITS - 1])
def test_an_id_names_its_image_and_row(key):
    ids = image_ids(key, MAX_ROWS)
    assert [key_of(i) for i in (ids[0], ids[-1])] == [key, key] and list(map(row_of, ids)) == list(range(MAX_ROWS))
    assert max(ids) < -1 and min(ids) >= -(2**63)  # -1 is NO_TOKEN


@pytest.mark.parametrize("key, count", [(0, 1), (2**KEY_BITS, 1), (1, 0), (1, MAX_ROWS + 1)])
def test_keys_and_counts_have_bounds(key, count):
    with pytest.raises(ValueError, match="allowed"):
        image_ids(key, count)
