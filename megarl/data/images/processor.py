"""A folder's image processor: the grid of an image from its size alone, and its pixels as the vision tower reads them.

Pixels are those of transformers' class with Pillow, asked for by name: the one with torchvision, which transformers
takes where that is installed, differs in 70 to 78 % of them. Rows of an image: t · h · w / merge² of its grid.
"""

import functools
import json
import math
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.images.names import MAX_ROWS, Pixels, content_digest, content_key
from megarl.data.tokenizers import Tokenizer
from megarl.errors import UsageError
from megarl.plain_files import read_json, reading

if TYPE_CHECKING:
    from PIL import Image

_FILES = ("preprocessor_config.json", "processor_config.json")
# Class in transformers without its ending -> smallest and largest pixels that it has for want of others.
_KINDS = {
    "Qwen2VLImageProcessor": (56 * 56, 28 * 28 * 1280),
    "Glm4vImageProcessor": (112 * 112, 28 * 28 * 15000),
}
_MAX_SETTING = 2**31


@dataclass(frozen=True)
class ImageProcessor:
    """The processor of a folder; it is a value without torch.

    `kind`: its class. `settings`: JSON text of the folder's description. `patch`, `merge`, `frames`: patches are
    `patch` pixels wide, merge² of them are one token, an image counts as `frames` equal ones. `min_pixels`,
    `max_pixels`: of a resized image. `placeholder`: string of the token that the chat template writes for an image.
    """

    kind: str
    settings: str
    patch: int
    merge: int
    frames: int
    min_pixels: int
    max_pixels: int
    placeholder: str

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
        if self.kind == "Glm4vImageProcessor":
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

    def tokens(self, width: int, height: int) -> int:
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
        frames = self.frames if self.kind == "Glm4vImageProcessor" else 1
        pixels = frames * rows * columns * self.patch**2
        if width * height * frames > self.max_pixels and pixels > self.max_pixels:
            enough = frames * math.ceil(max(width, height) / min(width, height)) * (self.patch * self.merge) ** 2
            raise UsageError(
                f"an image of {width} × {height} pixels is so narrow that {self.kind} makes {pixels:,} of it, more "
                f"than {self.max_pixels:,}; --image-max-pixels {enough} is enough"
            )
        return count

    def digest(self, of_bytes: str) -> str:
        """Hash of an image as this processor makes it; `of_bytes`: that of its file."""
        return content_digest(self.fingerprint.encode(), of_bytes.encode())

    def pixels(self, image: "Image.Image", of_bytes: str) -> Pixels:
        """What the tower reads of one image. UsageError: the library fails on it, or makes another grid."""
        try:
            found = _loaded(self)(images=[image], return_tensors="np")
        except (ValueError, TypeError, ArithmeticError, MemoryError) as error:
            raise UsageError(f"{self.kind} fails on an image of {image.size}: {str(error)[:200]}") from None
        grid, digest = tuple(found["image_grid_thw"][0].tolist()), self.digest(of_bytes)
        if grid != self.grid(*image.size):
            raise UsageError(f"{self.kind} made the grid {grid}, not {self.grid(*image.size)}")
        tokens = self.tokens(*image.size)
        return Pixels(found["pixel_values"], grid, tokens, content_key(digest), digest)


@functools.lru_cache(maxsize=4)
def _loaded(processor: ImageProcessor) -> Any:
    """transformers' own processor with Pillow."""
    import transformers

    settings = json.loads(processor.settings)
    for name in ("image_processor_type", "processor_class", "min_pixels", "max_pixels", "auto_map"):
        settings.pop(name, None)
    settings["size"] = {"shortest_edge": processor.min_pixels, "longest_edge": processor.max_pixels}
    return getattr(transformers, f"{processor.kind}Pil")(**settings)


def read_processor(
    path: Path, config: dict[str, Any], tokenizer: Tokenizer, where: str, max_pixels: int | None = None
) -> ImageProcessor | str:
    """The image processor of a folder, or the reason why images of data cannot be read with it.

    `config`: of its config.json. `max_pixels`: of `--image-max-pixels`; None: what the folder says.
    """
    token = config.get("image_token_id")
    if "vision_config" not in config or not isinstance(token, int):
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
    if kind not in _KINDS:
        return f"{where}: {file.name}: image_processor_type {kind!r}; known are {', '.join(_KINDS)}"
    placeholder = tokenizer.piece(token)
    if placeholder not in tokenizer.special:
        return f"{where}: image_token_id {token} is no special token of the tokenizer"
    return _processor(kind, settings, placeholder, f"{where}: {file.name}", max_pixels)


def _processor(
    kind: str, settings: dict[str, Any], placeholder: str, where: str, max_pixels: int | None
) -> ImageProcessor:
    size = settings.get("size") if isinstance(settings.get("size"), dict) else {}
    least, most = _KINDS[kind]
    numbers = {
        "patch_size": settings.get("patch_size", 14),
        "merge_size": settings.get("merge_size", 2),
        "temporal_patch_size": settings.get("temporal_patch_size", 2),
        "min_pixels": settings.get("min_pixels") or size.get("shortest_edge") or least,
        "max_pixels": settings.get("max_pixels") or size.get("longest_edge") or most,
    }
    for name, value in numbers.items():
        if type(value) is not int or not 1 <= value <= _MAX_SETTING:
            raise UsageError(f"{where}: {name} {value!r}; allowed: a whole number from 1 to {_MAX_SETTING}")
    side = numbers["patch_size"] * numbers["merge_size"]
    if max_pixels is not None:
        if max_pixels < side**2:
            raise UsageError(f"--image-max-pixels {max_pixels}: allowed is at least {side**2}, one token of {where}")
        numbers["max_pixels"] = max_pixels
        numbers["min_pixels"] = min(numbers["min_pixels"], max_pixels)
    patch, merge, frames, least, most = numbers.values()
    return ImageProcessor(kind, json.dumps(settings, sort_keys=True), patch, merge, frames, least, most, placeholder)
