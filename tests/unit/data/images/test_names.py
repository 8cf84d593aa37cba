"""Names of images: the key of a hash, and hashes of several parts."""

import hashlib

import pytest

from megarl.data.images.names import (
    KEY_BITS,
    MAX_ROWS,
    ImageRef,
    content_digest,
    content_key,
    image_ids,
    key_of,
    row_of,
    sha256_of,
)


@pytest.mark.parametrize("digest", ["0" * 64, "f" * 64, f"{2**47 - 1:016x}" + "0" * 48, sha256_of(b"a picture")])
def test_a_key_is_in_the_range_of_ids(digest):
    """Also those of hashes whose bits are all 0 or all 1: id −1 is no image's."""
    key = content_key(digest)
    assert 1 <= key < 1 << KEY_BITS
    first, last = image_ids(key, 2)
    assert -(1 << 63) <= last < first < -1
    assert (key_of(last), row_of(first), row_of(last)) == (key, 0, 1)


def test_hashes_tell_where_a_part_ends():
    assert content_digest(b"ab", b"c") != content_digest(b"a", b"bc") != content_digest(b"abc")
    assert sha256_of(b"abc") == hashlib.sha256(b"abc").hexdigest()


def test_a_name_has_size_and_hash():
    assert ImageRef("12ab34cd" * 8, 640, 480).name == "[image 640×480 sha:12ab34cd]"


# -- ids of image rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [1, 2, 12345, 2**KEY_BITS - 1])
def test_an_id_names_its_image_and_row(key):
    ids = image_ids(key, MAX_ROWS)
    assert [key_of(i) for i in (ids[0], ids[-1])] == [key, key] and list(map(row_of, ids)) == list(range(MAX_ROWS))
    assert max(ids) < -1 and min(ids) >= -(2**63)  # -1 is NO_TOKEN


@pytest.mark.parametrize("key, count", [(0, 1), (2**KEY_BITS, 1), (1, 0), (1, MAX_ROWS + 1)])
def test_keys_and_counts_have_bounds(key, count):
    with pytest.raises(ValueError, match="allowed"):
        image_ids(key, count)
