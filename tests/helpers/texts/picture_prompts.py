"""Folders of vision-language families without weights: tokenizer, chat template and image processor; drawn pictures."""

import io
import json
from collections.abc import Callable
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
# As that of Mistral Small 3.1, and one of LLaVA's.
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '[SYSTEM_PROMPT]' if message.role == 'system' else '[INST]' if message.role == 'user' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for block in message.content %}
            {%- if block.type == 'text' %}{{- block.text }}{%- elif block.type == 'image' %}{{- '[IMG]' }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '[/SYSTEM_PROMPT]' if message.role == 'system' else '[/INST]' if message.role == 'user' else eos_token }}
{%- endfor %}
"""
LLAVA = """\
{%- for message in messages %}
    {{- message.role | upper + ': ' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for content in message.content %}
            {%- if content.type == 'image' %}{{- '<image>\n' }}{%- else %}{{- content.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '</s>' if message.role == 'assistant' else ' ' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{%- endif %}
"""
_MISTRAL = ["<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]",
            "[IMG_BREAK]", "[IMG_END]"]  # fmt: skip
# Special tokens, template, placeholder of an image, end of a turn, padding.
_TEXTS = {
    "qwen": (_QWEN, QWEN_VL, "<|image_pad|>", "<|im_end|>", "<|endoftext|>"),
    "glm4v": (_GLM, GLM_V, "<|image|>", "<|user|>", "<|endoftext|>"),
    "mistral3": (_MISTRAL, MISTRAL, "[IMG]", "</s>", "<s>"),
    "llava": (["<s>", "</s>", "<image>"], LLAVA, "<image>", "</s>", "<s>"),
}
_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_SIZES = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, **_CLIP}
_QWEN2 = {"min_pixels": 3136, "max_pixels": 12845056, **_SIZES, "image_processor_type": "Qwen2VLImageProcessor"}
# What config.json says of the tokens of an image.
_CONFIGS = {
    "mistral3": {"vision_config": {"patch_size": 14}, "spatial_merge_size": 2},
    "llava": {"vision_config": {"patch_size": 14, "image_size": 336}},
}
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
    "mistral3": {
        "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, **_CLIP, "patch_size": 14,
        "resample": 3, "rescale_factor": 1 / 255, "size": {"longest_edge": 1540}, "processor_class": "PixtralProcessor",
        "image_processor_type": "PixtralImageProcessor",
    },
    "llava": {
        "crop_size": {"height": 336, "width": 336}, "do_center_crop": True, "do_normalize": True, "do_resize": True,
        **_CLIP, "resample": 3, "size": {"shortest_edge": 336}, "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
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
    special, template, place, end, padding = _TEXTS.get(family, _TEXTS["qwen"])
    made = small_tokenizers._byte_level(["the", "picture"])
    names = {"bos_token": "<s>"} if "<s>" in special else {}
    small_tokenizers.save(folder, made, special, eos_token=end, pad_token=padding, chat_template=template, **names)
    config = {"model_type": family, "vision_config": {}, "image_token_id": made.token_to_id(place)}
    (folder / "config.json").write_text(json.dumps(config | _CONFIGS.get(family, {})))
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


# -- data sets as they are published -----------------------------------------------------------------------------------

_TEXT, _ANSWER = {"dtype": "string", "_type": "Value"}, "You FIRST think. The final answer MUST BE put in \\boxed{}."
_OF_MESSAGES = [{"content": [{"text": _TEXT, "type": _TEXT}], "role": _TEXT}]
_OF_IMAGES = {"feature": {"_type": "Image"}, "_type": "Sequence"}


def _said(role: str, *parts: str | None) -> list[dict]:
    """A message of TRL's preferences; None: an image."""
    kinds = [{"text": part, "type": "image" if part is None else "text"} for part in parts]
    return [{"content": kinds, "role": role}]


def _geometry(number: int, image: dict) -> dict:
    problem = f"<image>Find x{number}."
    return {
        "images": [image], "data_source": "hiyouga/geometry3k", "ability": "math",
        "prompt": [{"content": f"{problem} {_ANSWER}", "role": "user"}],
        "reward_model": {"ground_truth": str(number), "style": "rule"},
        "extra_info": {"answer": str(number), "index": number, "question": problem, "split": "train"},
    }  # fmt: skip


def _preference(number: int, image: dict) -> dict:
    chosen, rejected = _said("assistant", f"the picture {number}"), _said("assistant", "none")
    return {
        "chosen": chosen, "rejected": rejected, "images": [image],
        "prompt": _said("user", None, f"What is picture {number}?"),
    }  # fmt: skip


def _university(number: int, image: dict) -> dict:
    columns = {f"image_{i}": image if i <= 1 + number % 2 else None for i in range(1, 8)}
    question = f"Question {number}: is <image 2> like <image 1>?" if number % 2 else "What is <image 1>?"
    return {"id": f"validation_{number}", "question": question, "options": "['a', 'b']", "answer": "B", **columns}


# Name -> the file of a set, its line of a number and an image, and what `datasets` says of its columns.
PUBLISHED: dict[str, tuple[str, Callable[[int, dict], dict], dict]] = {
    "geo3k": ("train.parquet", _geometry, {"images": _OF_IMAGES}),  # as verl's examples write geometry3k
    "rlaif-v": ("data/train-00000-of-00001.parquet", _preference,  # of TRL's examples
                dict.fromkeys(("chosen", "rejected", "prompt"), _OF_MESSAGES) | {"images": _OF_IMAGES}),
    "mmmu": ("validation.parquet", _university, {f"image_{i}": {"_type": "Image"} for i in range(1, 8)}),
}  # fmt: skip


def write_published(name: str, folder: Path, count: int = 12) -> Path:
    """The lines of a data set's form, with drawn pictures instead of its own; returns its file."""
    import pyarrow
    import pyarrow.parquet

    file, line, features = PUBLISHED[name]
    sizes = [(64, 64), (96, 64), (64, 96)]
    pictures = [encoded(picture(*sizes[i % 3], i), "JPEG" if i % 2 else "PNG") for i in range(count)]
    rows = [line(i, {"bytes": data, "path": f"{i}.png"}) for i, data in enumerate(pictures)]
    table = pyarrow.Table.from_pylist(rows)
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path = folder / name / file
    path.parent.mkdir(parents=True)
    pyarrow.parquet.write_table(table, path)
    return path
