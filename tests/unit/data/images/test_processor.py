"""A folder's image processor: the grids of transformers' classes without them, and what is refused."""

import json

import numpy as np
import pytest

from megarl.data.images.processor import read_processor
from megarl.data.tokenizers_hf import HuggingFaceTokenizer
from megarl.errors import UsageError
from tests.helpers.texts.picture_prompts import PROCESSORS, processor_of, write_folder
from tests.helpers.tiers import by_default
from tests.helpers.worlds import on_each_rank

SIZES = [(64, 48), (640, 480), (1000, 333), (37, 5000), (3024, 4032), (28, 28), (13, 14), (8191, 50), (1, 1), (45, 46)]


BY_AREA = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")


@pytest.mark.parametrize("family", by_default(BY_AREA, ["qwen3_vl", "glm4v"]))
@on_each_rank()
def test_grids_are_those_of_transformers(rank, family, tmp_path):
    import transformers

    folder, settings = write_folder(tmp_path / "folder", family), dict(PROCESSORS[family])
    kind = settings.pop("image_processor_type").removesuffix("Fast")
    for name in ("min_pixels", "max_pixels"):  # they would win over the size
        settings.pop(name, None)
    for pixels in (None, 100_000):
        found = processor_of(folder, pixels)
        size = {"shortest_edge": found.min_pixels, "longest_edge": found.max_pixels}
        theirs = getattr(transformers, f"{kind}Pil")(**settings | {"size": size})
        for width, height in SIZES:
            grid = found.grid(width, height)
            assert grid[1] * grid[2] == theirs.get_number_of_image_patches(height, width, {}), (width, height)


@on_each_rank()
def test_grids_of_pixtral_and_of_one_size(rank, tmp_path):
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    folder = write_folder(tmp_path / "a", "mistral3")
    for pixels, longest in ((None, 1540), (100_000, 308)):  # 308 is 11 · 28, the largest side within 100,000 pixels
        found = processor_of(folder, pixels)
        for width, height in SIZES:
            shape = np.broadcast_to(np.zeros(1, np.uint8), (3, height, width))
            high, wide = get_resize_output_image_size(shape, longest, 28)
            assert found.grid(width, height) == (1, high // 14, wide // 14), (width, height)
            assert found.rows(width, height) == high * wide // 28**2
            assert found.tokens(width, height) == high // 28 * (wide // 28 + 1) == len(found.ids(7, width, height))
    one = processor_of(write_folder(tmp_path / "b", "llava"))
    assert {one.grid(*each) for each in SIZES} == {(1, 24, 24)} and one.tokens(5, 9) == 576
    with pytest.raises(UsageError, match="--image-max-pixels 1000: .* makes all images 336 × 336"):
        processor_of(tmp_path / "b", 1000)
    for family, settings, needle in (
        ("llava", {"crop_size": {"height": "x", "width": 2}}, "height 'x'; allowed: a whole number"),
        ("mistral3", {"size": {"longest_edge": 20}}, "longest_edge 20; allowed: at least 28, one token"),
    ):
        with pytest.raises(UsageError, match=needle):
            processor_of(write_folder(tmp_path / needle[:6], family, **settings))


def test_an_image_of_too_many_tokens_names_the_flag(tmp_path):
    found = processor_of(write_folder(tmp_path / "folder", "qwen2_vl", max_pixels=2**30))
    with pytest.raises(
        UsageError, match="becomes .* tokens; allowed: 1 to 65,536, as with --image-max-pixels 51380224"
    ):
        found.tokens(20_000, 20_000)


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
def test_a_narrow_image_beyond_the_bound_names_one_that_is_enough(family, tmp_path):
    folder = write_folder(tmp_path / "folder", family)
    narrow = processor_of(folder, 20_000)
    with pytest.raises(UsageError, match="8191 × 50 pixels is so narrow that .* makes .*, more than 20,000") as caught:
        narrow.tokens(8191, 50)
    enough = int(str(caught.value).split("--image-max-pixels ")[1].split()[0])
    assert enough > 20_000 and processor_of(folder, enough).tokens(8191, 50) > 1
    assert narrow.tokens(30, 1) >= 1  # made larger, so the bound is not what it exceeds


def test_settings_and_their_hash(tmp_path):
    one = processor_of(write_folder(tmp_path / "a"))
    assert one.fingerprint != processor_of(tmp_path / "a", 100_000).fingerprint
    assert one.fingerprint != processor_of(write_folder(tmp_path / "b", image_mean=[0.4] * 3)).fingerprint
    assert one.facts["processor"] == "Qwen2VLImageProcessorPil" and "pillow" in one.facts
    with pytest.raises(UsageError, match="--image-max-pixels 100: allowed is at least 1024"):
        processor_of(tmp_path / "a", 100)
    with pytest.raises(UsageError, match="preprocessor_config.json: patch_size 'x'; allowed: a whole number"):
        processor_of(write_folder(tmp_path / "c", patch_size="x"))


def test_why_a_folder_has_none(tmp_path):
    folder = write_folder(tmp_path / "a")
    tokenizer = HuggingFaceTokenizer(str(folder))
    config = json.loads((folder / "config.json").read_text())

    def reason(**changed) -> str:
        found = read_processor(folder, config | changed, tokenizer, "--hf-model X")
        assert isinstance(found, str)
        return found

    assert reason(image_token_id=None, model_type="llama") == "--hf-model X (llama) has no vision tower"
    assert "image_token_id 5 is no special token" in reason(image_token_id=5)
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "LlavaNextImageProcessor"}))
    assert "image_processor_type 'LlavaNextImageProcessor'; known are Qwen2VL" in reason()
    (folder / "preprocessor_config.json").unlink()
    assert "has no image processor; expected preprocessor_config.json" in reason()
