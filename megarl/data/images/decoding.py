"""Bytes of an image as pixels: the header first, limits before anything is decoded, a confined process if asked.

Decoding costs what a header says, not what a file weighs: a PNG of 16 KB may ask for 366 MiB. Pillow reads what is
known by its first bytes, PNG, JPEG, WebP, GIF (the first frame) and BMP, and none of its other formats.
`python -m megarl.data.images.decoding FD DOOR NAME` is the warm process that decodes in confined children.
"""

import base64
import contextlib
import io
import re
import struct
import sys
from typing import TYPE_CHECKING, Any

from megarl.confine import warm_process
from megarl.errors import UsageError

if TYPE_CHECKING:
    from PIL import Image

MAX_BYTES, MAX_PIXELS, MAX_SIDE = 20 << 20, 50_000_000, 32_768
MAX_RATIO = 200  # of the sides: the processors of Qwen and GLM refuse more
_SECONDS = 10.0  # of processor time that decoding an image may take
_MAGIC = {"PNG": b"\x89PNG\r\n\x1a\n", "JPEG": b"\xff\xd8\xff", "WEBP": b"RIFF", "GIF": b"GIF8", "BMP": b"BM"}
_NAMES = "FLIP_LEFT_RIGHT ROTATE_180 FLIP_TOP_BOTTOM TRANSPOSE ROTATE_270 TRANSVERSE ROTATE_90"
_TURNS = dict(enumerate(_NAMES.split(), start=2))  # of EXIF -> Pillow's
_SWAPPED = (5, 6, 7, 8)  # those that exchange width and height
_ORIENTATION = 0x0112
_SHOWN = 160  # characters of a reason


def size_of(data: bytes) -> tuple[int, int]:
    """(width, height) as a viewer shows them, from the header. UsageError: no image that is read, or beyond limits."""
    with _opened(data)[0] as image:
        return image.size[::-1] if _turn(image) in _SWAPPED else image.size


def check_whole(data: bytes):
    """UsageError for an image that is cut, or damaged where its sums show it: only then it is decoded."""
    image, kind = _opened(data)
    looks_whole = kind == "WEBP"  # whose reader looks at all of it
    if kind == "PNG":
        with contextlib.suppress(Exception):  # Pillow raises many kinds
            image.verify()
            looks_whole = True
    elif kind == "JPEG":  # its end comes after the last pixels
        looks_whole = data.rfind(b"\xff\xd9") > data.rfind(b"\xff\xda")
    if not looks_whole:
        decode(data)


def decode(data: bytes) -> "Image.Image":
    """RGB pixels and nothing else: turned as EXIF says, palettes and alpha over white, 16 bits scaled to 8. UsageError
    as `size_of`, and for damaged data."""
    from PIL import Image

    image, kind = _opened(data)
    try:
        turn = _turn(image)
        if image.mode.startswith("I;16") or image.mode in ("I", "F"):  # Pillow would clip 40,000 to 255
            image = image.convert("F").point(lambda value: value * (255 / 65535)).convert("L")
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
        if turn in _TURNS:
            image = image.transpose(Image.Transpose[_TURNS[turn]])
        return Image.frombytes("RGB", image.size, image.tobytes())
    except Exception as error:  # Pillow raises many kinds
        raise _refused(f"{kind} that cannot be decoded", error) from None


def decode_confined(data: bytes) -> "Image.Image":
    """`decode` in a confined process: for bytes of clients and environments. UsageError also if that dies."""
    from PIL import Image

    size = size_of(data)
    try:
        request = {"data": base64.b64encode(data).decode(), "size": size}
        found = warm_process.ask("megarl.data.images.decoding", "images", request)
    except warm_process.NoAnswer as error:
        raise UsageError(str(error)[:_SHOWN]) from None
    return Image.frombytes("RGB", size, base64.b64decode(found["rgb"]))


def is_picture(value: Any) -> bool:
    """Whether a value is an image of Pillow; imports nothing."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def url_of(data: bytes) -> str:
    """The data: URL of an image that is read."""
    kind = next((name for name, magic in _MAGIC.items() if data.startswith(magic)), "PNG")
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data).decode()}"


def png_of(image: "Image.Image") -> bytes:
    """A PNG of an image of Pillow, of its pixels as they are. UsageError as `decode`, and without a range of values."""
    _check_size(*image.size)
    if image.mode in ("I", "F"):
        raise UsageError(f"an image of Pillow in the mode {image.mode}; convert it to RGB")
    out = io.BytesIO()
    try:
        has_alpha = image.has_transparency_data
        is_kept = image.mode in ("1", "L", "I;16", "RGB", "RGBA") and "transparency" not in image.info
        plain = image.copy() if is_kept else image.convert("RGBA" if has_alpha else "RGB")
        plain.info = {}  # EXIF would turn it
        plain.save(out, "PNG", compress_level=1)
    except Exception as error:  # the file that it stands for may be damaged
        raise _refused("an image of Pillow that cannot be read", error) from None
    return out.getvalue()


def thumbnail(image: "Image.Image", side: int) -> bytes:
    """A PNG of a decoded image with sides of at most `side` pixels."""
    out = io.BytesIO()
    image.thumbnail((side, side))
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def _opened(data: bytes) -> tuple["Image.Image", str]:
    """An image whose header is read and whose pixels are not, and its kind."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # Pillow's own limit warns at 89 million, and comes after ours
    if len(data) > MAX_BYTES:
        raise UsageError(f"an image of {len(data):,} bytes; allowed: at most {MAX_BYTES:,}")
    kind = next((name for name, magic in _MAGIC.items() if data.startswith(magic)), None)
    is_packed = kind == "BMP" and struct.unpack("<I", data[30:34].ljust(4, b"\0"))[0] not in (0, 3)
    if kind is None or kind == "WEBP" and data[8:12] != b"WEBP" or is_packed:
        raise UsageError(f"not PNG, JPEG, WebP, GIF or plain BMP; it begins with {data[:8]!r}")
    try:
        image = Image.open(io.BytesIO(data), formats=[kind])
        frames = getattr(image, "n_frames", 1) if kind in ("PNG", "WEBP") else 1
        width, height = image.size
    except Exception as error:
        raise _refused(f"{kind} that Pillow cannot open", error) from None
    _check_size(width, height)
    if frames > 1:
        raise UsageError(f"{kind} of {frames} frames; allowed: one")
    return image, kind


def _check_size(width: int, height: int):
    longer, shorter = max(width, height), min(width, height)
    if width * height > MAX_PIXELS or longer > MAX_SIDE or longer > MAX_RATIO * shorter:
        raise UsageError(
            f"{width} × {height} pixels; allowed: {MAX_PIXELS:,} in all, {MAX_SIDE:,} a side, sides of {MAX_RATIO} to 1"
        )


def _refused(what: str, error: Exception) -> UsageError:
    reason = re.sub(r" ?<\S+ object at 0x\w+>", "", " ".join(str(error).split()))  # an address tells nobody anything
    return UsageError(f"{what}: {type(error).__name__} {reason}"[:_SHOWN])


def _turn(image: "Image.Image") -> int:
    from PIL import Image

    try:
        return Image.Image.getexif(image).get(_ORIENTATION, 1)  # of PNG the class's own decodes the whole first
    except Exception:  # EXIF without sense turns nothing
        return 1


class Decoder:
    """The `warm_process.Answers` of the warm process."""

    max_result = 4 * MAX_PIXELS + 4096  # base64 of RGB

    def warm_up(self):
        """Imports Pillow's readers."""
        from PIL import Image

        Image.init()

    def work(self, item: dict) -> dict:
        """{"rgb": base64 of the pixels} of {"data": base64 of an image, "size": of its header}."""
        found = decode(base64.b64decode(item["data"]))
        return {"rgb": base64.b64encode(found.tobytes()).decode(), "size": [*found.size]}

    def checked(self, result: dict) -> dict:
        """The result, if it is as long as it says."""
        width, height = map(int, result["size"])
        if len(result["rgb"]) != 4 * width * height:  # 3 bytes are 4 characters
            raise ValueError("other pixels than it says")
        return {"rgb": str(result["rgb"]), "size": [width, height]}

    def answer(self, request: dict, within: warm_process.Children) -> dict:
        """{"rgb"} of the size that the caller knows, or {"problem": why there is none}."""
        found = within.in_own_child(request, _SECONDS)
        if found.get("size", request["size"]) != request["size"]:
            return {"problem": f"its header says {request['size']}, its pixels are {found['size']}"}
        return found


if __name__ == "__main__":
    warm_process.main(lambda name: Decoder())
