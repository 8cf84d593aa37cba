"""Folders of vision-language families without weights: tokenizer, chat template and image processor; drawn pictures."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megarl.data.conversations import Encoder
from megarl.data.images.book import Images
from megarl.data.images.processor import ImageProcessor, read_processor
from megarl.data.tokenizers_hf import HuggingFaceTokenizer
from tests.helpers.texts import small_tokenizers

# As the published templates of Qwen2-VL and later treat contents.
QWEN_VL = """\
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for content in message.content %}
            {%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in content %}{{- content.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# As that of GLM-4.1V and 4.5V.
GLM_V = """\
{{- '[gMASK]<sop>' }}
{%- for message in messages %}
    {{- '<|' + message.role + '|>\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for item in message.content %}
            {%- if item.type == 'image' or 'image' in item %}{{- '<|begin_of_image|><|image|><|end_of_image|>' }}
            {%- elif item.type == 'text' %}{{- item.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|user|>' if message.role == 'assistant' and loop.last else '' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
_QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
         "<|video_pad|>"]  # fmt: skip
_GLM = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|begin_of_image|>",
        "<|image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|video|>", "<|end_of_video|>"]  # fmt: skip
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_SIZES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **_CLIP}
_QWEN2 = {"min_pixels": 3136, "max_pixels": 12845056, **_SIZES, "image_processor_type": "Qwen2VLImageProcessor"}
# Family -> the published preprocessor_config.json of a model of it.
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**_QWEN2, "processor_class": "Qwen2VLProcessor"},
    "qwen2_5_vl": {**_QWEN2, "processor_class": "Qwen2_5_VLProcessor"},
    "qwen3_vl": {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
        "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
    },
    "glm4v": {
        "size": {"shortest_edge": 12544, "longest_edge": 9633792}, "do_rescale": True, **_SIZES,
        "image_processor_type": "Glm4vImageProcessor", "processor_class": "Glm4vProcessor",
    },
}  # fmt: skip


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """A smooth picture with noise, another one for each seed."""
    noise = np.random.default_rng(seed).integers(0, 64, (height, width, 3))
    y, x = np.mgrid[0:height, 0:width]
    waves = np.stack([(x + 31 * seed) % 192, (y + 17 * seed) % 192, (x + y) % 192], -1)
    return Image.fromarray((waves + noise).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def write_folder(folder: Path, family: str = "qwen3_vl", **settings) -> Path:
    """A folder without weights. `settings`: instead of those of the family's processor."""
    is_glm = family == "glm4v"
    special, template = (_GLM, GLM_V) if is_glm else (_QWEN, QWEN_VL)
    made = small_tokenizers._byte_level(["the", "picture"])
    end = "<|user|>" if is_glm else "<|im_end|>"
    small_tokenizers.save(folder, made, special, eos_token=end, pad_token="<|endoftext|>", chat_template=template)
    token = made.token_to_id("<|image|>" if is_glm else "<|image_pad|>")
    config = {"model_type": family, "vision_config": {}, "image_token_id": token}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family] | settings))
    return folder


def processor_of(folder: Path, max_pixels: int | None = None) -> ImageProcessor:
    config = json.loads((folder / "config.json").read_text())
    found = read_processor(folder, config, HuggingFaceTokenizer(str(folder)), f"--hf-model {folder}", max_pixels)
    assert isinstance(found, ImageProcessor), found
    return found


def encoder_of(folder: Path, max_pixels: int | None = None, max_images: int = 8) -> Encoder:
    """The encoder of a folder, which knows no image yet."""
    from megarl.data.chat import ChatTemplate

    tokenizer = HuggingFaceTokenizer(str(folder))
    images = Images(processor_of(folder, max_pixels), max_images)
    return Encoder(tokenizer, ChatTemplate(tokenizer.template, tokenizer, images=images))
