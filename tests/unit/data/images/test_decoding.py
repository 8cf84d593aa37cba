"""Images of every kind as a viewer shows them; hostile ones, each one line, before memory is taken."""

import io
import random
import struct
import tracemalloc
import zlib

import pytest
from PIL import Image

from megarl.confine import compute_only
from megarl.data.images import decoding
from megarl.data.images.decoding import check_whole, decode, decode_confined, size_of
from megarl.errors import UsageError
from tests.helpers.texts.picture_prompts import encoded, picture
from tests.helpers.tiers import by_default


def turned(kind: str, turn: int) -> bytes:
    image = picture(64, 48)
    exif = image.getexif()
    exif[0x0112] = turn
    return encoded(image, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))


def header(width: int, height: int) -> bytes:
    """A PNG whose header says a size, without pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def frames(kind: str) -> bytes:
    return encoded(picture(8, 8), kind, save_all=True, append_images=[picture(8, 8, 1), picture(8, 8, 2)])


PLAIN = picture(64, 48)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP"])
def test_pixels_without_loss_are_those_of_the_picture(kind):
    found = decode(encoded(PLAIN, kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert found == PLAIN


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("turn", by_default({n: n for n in range(1, 9)}, [3, 6]))
def test_exif_turns_an_image_and_its_size(kind, turn):
    from io import BytesIO

    from PIL import ImageOps

    data = turned(kind, turn)
    expected = ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB")
    found = decode(data)
    assert (found.size, found.tobytes()) == (expected.size, expected.tobytes()) and size_of(data) == expected.size
    assert not found.info  # which would have it turned again
    assert turn < 5 or expected.size == (48, 64)


def test_colours_become_those_that_a_viewer_shows():
    grey = decode(encoded(Image.new("I;16", (2, 2), 40000), "PNG")).tobytes()
    assert set(grey) == {155}  # Pillow's own conversion clips to 255
    clear = decode(encoded(Image.new("RGBA", (2, 2), (10, 20, 30, 0)), "PNG")).tobytes()
    assert set(clear) == {255}  # over white, as qwen_vl_utils
    assert set(decode(encoded(Image.new("P", (2, 2)), "PNG", transparency=0)).tobytes()) == {255}
    assert len(decode(encoded(Image.new("CMYK", (2, 2)), "JPEG")).tobytes()) == 12
    assert decode(frames("GIF")).size == (8, 8)  # the first frame


REFUSED = {
    "text": (b"hello", "not PNG, JPEG, WebP, GIF or plain BMP; it begins with b'hello'"),
    "nothing": (b"", "it begins with b''"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it begins with b'<svg xml'"),
    "TIFF": (encoded(PLAIN, "TIFF"), "not PNG"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not PNG"),
    "PDF": (b"%PDF-1.7\n", "not PNG"),
    "RIFF of sound": (b"RIFF\0\0\0\0WAVEfmt ", "not PNG"),
    "BMP in runs": (encoded(PLAIN, "BMP")[:30] + struct.pack("<I", 1) + encoded(PLAIN, "BMP")[34:], "plain BMP"),
    "cut PNG": (encoded(PLAIN)[:-400], "PNG that cannot be decoded"),
    "cut JPEG": (encoded(PLAIN, "JPEG")[:700], "JPEG that cannot be decoded"),
    "half a header": (encoded(PLAIN)[:20], "PNG that Pillow cannot open"),
    "huge header": (header(2**31 - 1, 2**31 - 1), "pixels; allowed: 50,000,000 in all"),
    "many pixels": (header(30000, 30000), "30000 × 30000 pixels"),
    "long side": (header(40000, 1000), "32,768 a side"),
    "ratio": (header(20000, 4), "sides of 200 to 1"),
    "frames": (frames("WEBP"), "WEBP of 3 frames; allowed: one"),
    "PNG with frames": (frames("PNG"), "PNG of 3 frames; allowed: one"),
    "bytes": (b"\xff\xd8\xff" + bytes(decoding.MAX_BYTES), "bytes; allowed: at most 20,971,520"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_image_is_one_line(name):
    data, needle = REFUSED[name]
    with pytest.raises(UsageError) as failure:
        decode(data)
    assert needle in str(failure.value) and "\n" not in str(failure.value) and len(str(failure.value)) < 300


def of_mode(mode: str, **info) -> Image.Image:
    image = PLAIN.convert(mode)
    image.info |= info
    return image


PILLOW = {
    **{mode: of_mode(mode) for mode in ("RGB", "L", "1", "P", "CMYK", "YCbCr", "HSV", "LA", "RGBA")},
    "transparent": of_mode("P", transparency=3),
    "turned": Image.open(io.BytesIO(turned("JPEG", 6))),
    "16 bits": Image.frombytes("I;16", (2, 2), struct.pack("<4H", 0, 40000, 65535, 257)),
}


@pytest.mark.parametrize("name", PILLOW)
def test_images_of_pillow_keep_their_pixels(name):
    image, found = PILLOW[name], decode(decoding.png_of(PILLOW[name]))
    expected = {"16 bits": Image.frombytes("L", (2, 2), bytes((0, 155, 255, 1)))}.get(name, image)
    if image.has_transparency_data:
        expected = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    assert found.size == image.size and found.tobytes() == expected.convert("RGB").tobytes()


@pytest.mark.parametrize(
    "image, needle",
    [
        (Image.new("F", (4, 4)), "in the mode F; convert it"),
        (Image.new("I", (4, 4)), "in the mode I; convert it"),
        (Image.new("1", (16000, 8000)), "16000 × 8000 pixels; allowed"),
        (Image.new("RGB", (0, 0)), "cannot be read"),
        (Image.open(io.BytesIO(encoded(PLAIN)[:900])), "an image of Pillow that cannot be read: "),
    ],
)
def test_images_of_pillow_that_are_refused(image, needle):
    with pytest.raises(UsageError, match=needle):
        decoding.png_of(image)


def test_a_bomb_is_refused_by_its_header():
    bomb = encoded(Image.new("1", (16000, 8000)))
    assert len(bomb) < 40_000
    size_of(encoded(PLAIN))  # imports
    tracemalloc.start()
    with pytest.raises(UsageError, match="16000 × 8000 pixels"):
        decode(bomb)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_damaged_bytes_are_a_picture_or_one_line(kind):
    data, chance, refused = encoded(picture(24, 16), kind), random.Random(kind), 0
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 8)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            found = decode(bytes(damaged))
            assert len(found.tobytes()) == 3 * found.width * found.height
        except UsageError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused


def is_refused(function, data: bytes) -> bool:
    try:
        function(data)
    except UsageError as error:
        assert "\n" not in str(error) and " at 0x" not in str(error)
        return True
    return False


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_what_is_cut_is_found_where_data_are_read(kind):
    data, cuts = encoded(picture(48, 40), kind), 0
    for length in range(8, len(data) + 1, 11):
        is_cut = is_refused(decode, data[:length])
        assert is_refused(check_whole, data[:length]) == is_cut, length
        cuts += is_cut
    assert cuts > 20 and not is_refused(check_whole, data) and not is_refused(check_whole, data + b"\0more")


def test_what_is_whole_is_not_decoded_where_data_are_read(monkeypatch):
    damaged = bytearray(encoded(PLAIN))
    damaged[len(damaged) // 2] ^= 1
    assert is_refused(check_whole, bytes(damaged)) == is_refused(decode, bytes(damaged))
    asked = []
    monkeypatch.setattr(decoding, "decode", asked.append)
    for kind in ("PNG", "JPEG", "WEBP"):
        check_whole(encoded(PLAIN, kind))
    assert not asked
    check_whole(bytes(damaged))
    assert asked == [damaged]


@pytest.mark.skipif(compute_only.works() is not None, reason="this machine cannot confine a process")
def test_sent_images_are_decoded_in_a_confined_process():
    for data in (encoded(PLAIN), encoded(PLAIN, "JPEG"), encoded(PLAIN, "WEBP"), turned("JPEG", 6)):
        assert decode_confined(data) == decode(data)
    for name in ("cut JPEG", "TIFF", "huge header"):
        with pytest.raises(UsageError, match=REFUSED[name][1][:20]):
            decode_confined(REFUSED[name][0])


def test_a_childs_result_is_checked():
    checked = decoding.Decoder().checked
    assert checked({"rgb": "AAAA" * 6, "size": [3, 2]})["size"] == [3, 2]
    with pytest.raises(ValueError, match="other pixels"):
        checked({"rgb": "AAAA", "size": [3, 2]})
