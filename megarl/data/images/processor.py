"""A folder's image processor: the grid of an image from its size alone, and its pixels as the vision tower reads them.

Pixels are those of transformers' class with Pillow, asked for by name: the one with torchvision, which transformers
takes where that is installed, differs in 70 to 78 % of them. Rows of an image: t · h · w / merge² of its grid. Tokens
of Pixtral's are these, and a break after each line of them, which is text.
"""

import functools
import json
import math
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.images.names import MAX_ROWS, Pixels, content_digest, content_key, image_ids
from megarl.data.tokenizers import Tokenizer
from megarl.errors import UsageError
from megarl.plain_files import read_json, reading

if TYPE_CHECKING:
    from PIL import Image

_FILES = ("preprocessor_config.json", "processor_config.json")
# Class in transformers without its ending -> smallest and largest pixels that it has for want of others.
_BY_AREA = {
    "Qwen2VLImageProcessor": (56 * 56, 28 * 28 * 1280),
    "Glm4vImageProcessor": (112 * 112, 28 * 28 * 15000),
    "Glm46VImageProcessor": (112 * 112, 28 * 28 * 15000),
}
_OF_FRAMES = ("Glm4vImageProcessor", "Glm46VImageProcessor")  # an image counts as several
_PIXTRAL = "PixtralImageProcessor"
_FIXED = ("CLIPImageProcessor", "LlavaImageProcessor", "SiglipImageProcessor")  # all images become one size
KINDS = (*_BY_AREA, _PIXTRAL, *_FIXED)
_BREAKS = ("[IMG_BREAK]", "[IMG_END]")
_MAX_SETTING = 2**31


@dataclass(frozen=True)
class ImageProcessor:
    """The processor of a folder; it is a value without torch.

    `kind`: its class. `settings`: JSON text of the folder's description. `patch`, `merge`, `frames`: patches are
    `patch` pixels wide, merge² of them are one token, an image counts as `frames` equal ones. `min_pixels`,
    `max_pixels`: of a resized image. `placeholder`: string of the token that the chat template writes for an image.
    `sides`: height and width of every image; None: they depend on the image's. `breaks`: tokens after each line of
    rows, and after the last one.
    """

    kind: str
    settings: str
    patch: int
    merge: int
    frames: int
    min_pixels: int
    max_pixels: int
    placeholder: str
    sides: tuple[int, int] | None = field(default=None, repr=False)
    breaks: tuple[int, int] | None = field(default=None, repr=False)

    @property
    def fingerprint(self) -> str:
        """Hash of all that decides the pixels, but for versions of libraries."""
        return content_digest(repr(self).encode())

    @property
    def facts(self) -> dict[str, Any]:
        """What a run's manifest says of it: which class made the pixels, in which version."""
        versions = {"transformers": version("transformers"), "pillow": version("pillow")}
        return {"processor": f"{self.kind}Pil", "max_pixels": self.max_pixels, **versions}

    def grid(self, width: int, height: int) -> tuple[int, int, int]:
        """(t, h, w) in patches: sides are rounded to whole tokens, and scaled until the area is within bounds.

        The same as transformers' `get_number_of_image_patches` says, whose module imports torch.
        """
        side, frames = self.patch * self.merge, 1
        if self.sides is not None:
            return 1, self.sides[0] // self.patch, self.sides[1] // self.patch
        if self.kind == _PIXTRAL:
            ratio = max(1.0, max(height, width) / math.isqrt(self.max_pixels))
            rows, columns = (-(-math.floor(each / ratio) // side) * self.merge for each in (height, width))
            return 1, rows, columns
        if self.kind in _OF_FRAMES:
            frames = self.frames
            if min(width, height) < side:
                scale = max(side / height, side / width)
                width, height = int(width * scale), int(height * scale)
        rows, columns = (round(each / side) * side for each in (height, width))
        if frames * rows * columns > self.max_pixels:
            beta = math.sqrt(frames * height * width / self.max_pixels)
            rows, columns = (max(side, math.floor(each / beta / side) * side) for each in (height, width))
        elif frames * rows * columns < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (frames * height * width))
            rows, columns = (math.ceil(each * beta / side) * side for each in (height, width))
        return 1, rows // self.patch, columns // self.patch

    def rows(self, width: int, height: int) -> int:
        """Rows of an image in the token stream. UsageError: more than an id can name, or than `max_pixels` are: of a
        narrow image, whose shorter side is one token, the classes make the longer one too long."""
        _, rows, columns = self.grid(width, height)
        count = rows * columns // self.merge**2
        if not 1 <= count <= MAX_ROWS:
            fits = MAX_ROWS * (self.patch * self.merge) ** 2
            raise UsageError(
                f"an image of {width} × {height} pixels becomes {count:,} tokens; allowed: 1 to {MAX_ROWS:,}, as "
                f"with --image-max-pixels {fits}"
            )
        frames = self.frames if self.kind in _OF_FRAMES else 1
        pixels = frames * rows * columns * self.patch**2
        if self.kind in _BY_AREA and width * height * frames > self.max_pixels and pixels > self.max_pixels:
            enough = frames * math.ceil(max(width, height) / min(width, height)) * (self.patch * self.merge) ** 2
            raise UsageError(
                f"an image of {width} × {height} pixels is so narrow that {self.kind} makes {pixels:,} of it, more "
                f"than {self.max_pixels:,}; --image-max-pixels {enough} is enough"
            )
        return count

    def ids(self, key: int, width: int, height: int) -> list[int]:
        """The token ids of an image with a key. UsageError as `rows`."""
        ids = image_ids(key, self.rows(width, height))
        if self.breaks is None:
            return ids
        line, (between, end) = self.grid(width, height)[2] // self.merge, self.breaks
        broken = [i for first in range(0, len(ids), line) for i in (*ids[first : first + line], between)]
        return [*broken[:-1], end]

    def tokens(self, width: int, height: int) -> int:
        """How many `ids` there are."""
        rows, grid = self.rows(width, height), self.grid(width, height)
        return rows if self.breaks is None else rows + grid[1] // self.merge

    def digest(self, of_bytes: str) -> str:
        """Hash of an image as this processor makes it; `of_bytes`: that of its file."""
        return content_digest(self.fingerprint.encode(), of_bytes.encode())

    def pixels(self, image: "Image.Image", of_bytes: str) -> Pixels:
        """What the tower reads of one image. UsageError: the library fails on it, or makes another grid."""
        try:
            found = _loaded(self)(images=[image], return_tensors="np")
        except (ValueError, TypeError, ArithmeticError, MemoryError) as error:
            raise UsageError(f"{self.kind} fails on an image of {image.size}: {str(error)[:200]}") from None
        digest = self.digest(of_bytes)
        if "image_grid_thw" in found:
            grid = tuple(found["image_grid_thw"][0].tolist())
        else:
            grid = 1, *(side // self.patch for side in found["pixel_values"].shape[-2:])
        if grid != self.grid(*image.size):
            raise UsageError(f"{self.kind} made the grid {grid}, not {self.grid(*image.size)}")
        return Pixels(found["pixel_values"], grid, self.rows(*image.size), content_key(digest), digest)


@functools.lru_cache(maxsize=4)
def _loaded(processor: ImageProcessor) -> Any:
    """transformers' own processor with Pillow."""
    import transformers

    settings = json.loads(processor.settings)
    for name in ("image_processor_type", "processor_class", "min_pixels", "max_pixels", "auto_map"):
        settings.pop(name, None)
    if processor.kind in _BY_AREA:
        settings["size"] = {"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels}
    if processor.kind == _PIXTRAL:
        side = processor.patch * processor.merge
        settings |= {"size": {"longest_edge": math.isqrt(processor.max_pixels)}, "patch_size": side}
    return getattr(transformers, f"{processor.kind}Pil")(**settings)


def read_processor(
    path: Path, config: dict[str, Any], tokenizer: Tokenizer, where: str, max_pixels: int | None = None
) -> ImageProcessor | str:
    """The image processor of a folder, or the reason why images of data cannot be read with it.

    `config`: of its config.json. `max_pixels`: of `--image-max-pixels`; None: what the folder says.
    """
    token = config.get("image_token_id", config.get("image_token_index"))
    vision = config.get("vision_config")
    if not isinstance(vision, dict) or not isinstance(token, int):
        return f"{where} ({config.get('model_type')}) has no vision tower"
    file = next((path / name for name in _FILES if (path / name).is_file()), None)
    if file is None:
        return f"{where} has no image processor; expected {' or '.join(_FILES)}"
    with reading(f"{where}: {file.name}"):
        settings = read_json(file)
    if isinstance(settings, dict):
        settings = settings.get("image_processor", settings)
    kind = settings.get("image_processor_type") if isinstance(settings, dict) else None
    kind = str(kind).removesuffix("Fast").removesuffix("Pil")
    if kind not in KINDS:
        return f"{where}: {file.name}: image_processor_type {kind!r}; known are {', '.join(KINDS)}"
    placeholder = tokenizer.piece(token)
    if placeholder not in tokenizer.special:
        return f"{where}: image_token_id {token} is no special token of the tokenizer"
    breaks = None
    if kind == _PIXTRAL and config.get("model_type") != "lighton_ocr":
        if missing := [each for each in _BREAKS if each not in tokenizer.special]:
            return f"{where}: {missing[0]} is no special token of the tokenizer"
        breaks = tokenizer.special[_BREAKS[0]], tokenizer.special[_BREAKS[1]]
    text, where = json.dumps(settings, sort_keys=True), f"{where}: {file.name}"
    numbers, sides = _numbers(kind, settings, config, where)
    side = numbers["patch_size"] * numbers["merge_size"]
    if max_pixels is not None:
        if sides is not None:
            raise UsageError(f"--image-max-pixels {max_pixels}: {where} makes all images {sides[1]} × {sides[0]}")
        if max_pixels < side**2:
            raise UsageError(f"--image-max-pixels {max_pixels}: allowed is at least {side**2}, one token of {where}")
        numbers["max_pixels"] = max_pixels if kind in _BY_AREA else (math.isqrt(max_pixels) // side * side) ** 2
        numbers["min_pixels"] = min(numbers["min_pixels"], max_pixels)
    patch, merge, frames, least, most = numbers.values()
    return ImageProcessor(kind, text, patch, merge, frames, least, most, placeholder, sides, breaks)


def _numbers(
    kind: str, settings: dict[str, Any], config: dict[str, Any], where: str
) -> tuple[dict[str, int], tuple[int, int] | None]:
    """The whole numbers of a processor, in the order of its fields, and the height and width of every image, if they
    are the same. UsageError for other values."""
    size = settings.get("size") if isinstance(settings.get("size"), dict) else {}
    if kind in _BY_AREA:
        least, most = _BY_AREA[kind]
        numbers = {
            "patch_size": settings.get("patch_size", 14),
            "merge_size": settings.get("merge_size", 2),
            "temporal_patch_size": settings.get("temporal_patch_size", 2),
            "min_pixels": settings.get("min_pixels") or size.get("shortest_edge") or least,
            "max_pixels": settings.get("max_pixels") or size.get("longest_edge") or most,
        }
        return _checked(numbers, where), None
    # What these processors do not say of their tokens is the tower's, in config.json.
    patch, merge = config["vision_config"].get("patch_size", 16), config.get("spatial_merge_size", 1)
    if kind == _PIXTRAL:
        longest = size.get("longest_edge", 1024)
        numbers = _checked({"patch_size": patch, "merge_size": merge, "longest_edge": longest}, where)
        longest = numbers.pop("longest_edge")
        if longest < patch * merge:
            raise UsageError(f"{where}: longest_edge {longest}; allowed: at least {patch * merge}, one token")
        return numbers | {"temporal_patch_size": 1, "min_pixels": 1, "max_pixels": longest**2}, None
    size = settings.get("crop_size", size) if settings.get("do_center_crop", kind != _FIXED[-1]) else size
    size = size if isinstance(size, dict) else {"height": size, "width": size}
    numbers = _checked({"height": size.get("height"), "width": size.get("width"), "patch_size": patch}, where)
    height, width, patch = numbers.values()
    numbers = {"patch_size": patch, "merge_size": 1, "temporal_patch_size": 1}
    return numbers | {"min_pixels": height * width, "max_pixels": height * width}, (height, width)


def _checked(numbers: dict[str, Any], where: str) -> dict[str, int]:
    for name, value in numbers.items():
        if type(value) is not int or not 1 <= value <= _MAX_SETTING:
            raise UsageError(f"{where}: {name} {value!r}; allowed: a whole number from 1 to {_MAX_SETTING}")
    return numbers
