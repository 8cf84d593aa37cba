"""Names of images: the key of a hash, and hashes of several parts."""

import hashlib

import pytest

from megarl.data.images.ids import KEY_BITS, image_ids, key_of, row_of
from megarl.data.images.pixels import ImageRef, content_digest, content_key, sha256_of


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
