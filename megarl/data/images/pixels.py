"""What a vision tower reads of an image, and where an image of a prompt comes from."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.data.images.ids import KEY_BITS

if TYPE_CHECKING:  # flags import this module, and need no numbers
    import numpy as np


@dataclass(frozen=True)
class ImageRef:
    """An image of a prompt before it is decoded.

    `digest`: SHA-256 of its bytes, hexadecimal. `width`, `height`: pixels as a viewer shows it (turned by EXIF).
    `source`: the path of its file; None: the bytes are in the data, `blob` says which of the set's. `sent`: they came
    from a client or an environment.
    """

    digest: str
    width: int
    height: int
    source: str | None = None
    blob: int | None = None
    sent: bool = False

    @property
    def name(self) -> str:
        """What samples and logs show."""
        return f"[image {self.width}×{self.height} sha:{self.digest[:8]}]"


@dataclass(frozen=True)
class Pixels:
    """One image as its folder's processor gives it.

    `values`: float32, `pixel_values` of this image alone. `grid`: (t, h, w) in patches, `image_grid_thw`. `tokens`: its
    rows in the token stream. `key`: 47 bits that name it there. `digest`: all of the hash whose bits the key is.
    """

    values: "np.ndarray"
    grid: tuple[int, int, int]
    tokens: int
    key: int
    digest: str


def content_key(digest: str) -> int:
    """47 bits of a hexadecimal hash, at least 1."""
    return int(digest[:16], 16) % ((1 << KEY_BITS) - 1) + 1


def sha256_of(data: bytes) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def content_digest(*parts: bytes) -> str:
    """SHA-256 of parts, each with its length, hexadecimal."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()
