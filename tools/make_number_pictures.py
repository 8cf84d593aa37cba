"""Makes pictures of two-digit numbers, prompts that ask for them, and a small vision-language model that reads them.

    python tools/make_number_pictures.py --seed 1 --out data/numbers

Digits are drawn with 5 x 7 points, each 2 x 2 pixels, at a random place, in random colours and with noise. Writes to
DIR train.jsonl and heldout.jsonl (each line: prompt, images, answer), pictures/, and model/: a Hugging Face folder of
the shape of Qwen3-VL with random weights (0.9 M parameters), made of transformers' own classes. --shuffle gives each
line of train.jsonl the picture of another line: a control, from which nobody can learn more than the prior. The same
seed gives the same files.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from megarl.errors import ArgumentParser, UsageError, refuses_in_one_line, writing

# Rows of points from above, each a number of five bits.
GLYPHS = (
    "0e11131519110e 040c040404040e 0e11010204081f 1f02040201110e 02060a121f0202 "
    "1f101e0101110e 0608101e11110e 1f010204080808 0e11110e11110e 0e11110f01020c"
).split()
WIDTH, HEIGHT, SCALE = 32, 16, 2  # pixels; of a point
ASKED = "<image>number?"
SPECIAL = [
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|end|>' if message.role == 'assistant' else '' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 4096},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=1, help="random seed; default: %(default)s")
    parser.add_argument("--train", type=int, default=2000, help="training pictures; default: %(default)s")
    parser.add_argument("--heldout", type=int, default=200, help="held-out pictures; default: %(default)s")
    parser.add_argument(
        "--noise", type=int, default=60, help="largest change of a pixel, 0 to 128; default: %(default)s"
    )
    parser.add_argument("--shuffle", action="store_true", help="give the lines of train.jsonl each other's pictures")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for all files")
    arguments = parser.parse_args(argv)
    for name, (least, most) in {
        "seed": (0, 2**32),
        "train": (2, 10**6),
        "heldout": (1, 10**6),
        "noise": (0, 128),
    }.items():
        if not least <= (value := getattr(arguments, name)) <= most:
            raise UsageError(f"--{name} {value}: allowed is {least} to {most}")
    return arguments


def points(digit: str) -> np.ndarray:
    """[7, 5] bool of a digit."""
    rows = bytes.fromhex(GLYPHS[int(digit)])
    return np.array([[row >> (4 - column) & 1 for column in range(5)] for row in rows], bool)


def draw(number: str, noise: int, random: np.random.Generator) -> np.ndarray:
    """[HEIGHT, WIDTH, 3] uint8: dark on light or light on dark."""
    ground, ink = random.integers(150, 230, 3), random.integers(20, 90, 3)
    if random.random() < 0.5:
        ground, ink = ink, ground
    image = np.tile(ground, (HEIGHT, WIDTH, 1))
    for place, digit in enumerate(number):
        glyph = points(digit).repeat(SCALE, 0).repeat(SCALE, 1)
        top, left = random.integers(0, HEIGHT - len(glyph) + 1), place * WIDTH // 2 + random.integers(1, 6)
        image[top : top + glyph.shape[0], left : left + glyph.shape[1]][glyph] = ink
    return np.clip(image + random.integers(-noise, noise + 1, image.shape), 0, 255).astype(np.uint8)


def write_pictures(out: Path, name: str, count: int, arguments: argparse.Namespace, random: np.random.Generator):
    """Pictures and their lines; with --shuffle those for training are exchanged."""
    from PIL import Image

    lines = []
    for index in range(count):
        number, file = f"{random.integers(100):02}", f"pictures/{name}-{index:05}.png"
        Image.fromarray(draw(number, arguments.noise, random)).save(out / file)
        prompt = [{"role": "user", "content": ASKED}]
        lines.append({"prompt": prompt, "images": [file], "answer": number})
    if arguments.shuffle and name == "train":
        files = [lines[index]["images"] for index in random.permutation(count)]
        lines = [line | {"images": images} for line, images in zip(lines, files, strict=True)]
    (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_model(folder: Path, seed: int):
    """The folder of a model with random weights: tokenizer, template, image processor, config and tensors."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = {
        "vocab_size": 272,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rope_parameters": rotary,
        "bos_token_id": None,
        "eos_token_id": ids["<|end|>"],
        "pad_token_id": ids["<|end|>"],
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "depth": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config)
    with torch.no_grad():  # the tower stays as it is: its rows have to show the picture
        for parameter in model.model.visual.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"chat_template": TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


@refuses_in_one_line("make_number_pictures")
def main(argv: list[str]) -> int:
    arguments = parse_arguments(argv)
    out = Path(arguments.out)
    with writing(f"--out {out}"):
        (out / "pictures").mkdir(parents=True, exist_ok=True)
        random = np.random.default_rng(arguments.seed)
        write_pictures(out, "heldout", arguments.heldout, arguments, random)
        write_pictures(out, "train", arguments.train, arguments, random)
        write_model(out / "model", arguments.seed)
    print(f"make_number_pictures: {arguments.train} + {arguments.heldout} pictures and a model in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
