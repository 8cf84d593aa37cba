"""Damage to Hugging Face folders, and the line with which a program refuses one."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.forked_programs import refusal
from tests.helpers.programs import write_lines

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
FLAGS = "--max-prompt-length 48 --max-response-length 16"
Damage = Callable[[Path], Any]


def argv(tmp_path: Path, folder: Path | str, program: str = "sft", flags: str = "") -> list[str]:
    """Command line of a small run of a folder's model."""
    lines = {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    prompts = write_lines(tmp_path / "prompts.jsonl", [lines[program == "reward"]])
    batch = {
        "rl": "--max-tokens-per-microbatch 128 --prompts-per-step 2 --samples-per-prompt 2 --minibatch-size 2",
        "sft": "--max-tokens-per-microbatch 128 --global-batch-size 1",
        "reward": "--max-tokens-per-microbatch 128 --global-batch-size 1",
        "evaluate": "",
    }[program]
    name = "--eval-prompts" if program == "evaluate" else "--prompts"
    save = f"--save {tmp_path / 'run'}"
    return ["--hf-model", str(folder), *f"{FLAGS} {batch} {name} {prompts} {save} {flags}".split()]


def line_of(tmp_path: Path, folder: Path | str, program: str = "sft", flags: str = "") -> str:
    """The line of a program that must refuse a folder."""
    line = refusal(argv(tmp_path, folder, program, flags), program, size=2)
    assert not (tmp_path / "run").exists()
    return line


def edit(name: str, change: Callable[[dict], dict]) -> Damage:
    """A JSON file with other content."""
    return lambda folder: (folder / name).write_text(json.dumps(change(json.loads((folder / name).read_text()))))


def config(**entries) -> Damage:
    """config.json with other entries."""
    return edit(CONFIG, lambda content: content | entries)


def text_config(**entries) -> Damage:
    """config.json of a multimodal folder with other entries of its language model."""
    return edit(CONFIG, lambda content: content | {"text_config": content["text_config"] | entries})


def rope(**entries) -> Damage:
    """config.json with other rotary embeddings."""
    return edit(CONFIG, lambda content: content | {"rope_parameters": content["rope_parameters"] | entries})


def without(*names: str) -> Damage:
    """config.json without entries, which transformers fills with its defaults."""
    return edit(CONFIG, lambda content: {name: value for name, value in content.items() if name not in names})


def index(change: Callable[[dict[str, str]], object]) -> Damage:
    """Another weight_map in the index."""
    return edit(INDEX, lambda content: content | {"weight_map": change(content["weight_map"])})


def text(name: str, content: str | bytes) -> Damage:
    """A file of this content."""
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def remove(name: str) -> Damage:
    """A missing file."""
    return lambda folder: (folder / name).unlink()


def cut(name: str, count: int) -> Damage:
    """A file of its first bytes, or without its last ones."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:count])


def tensors(change: Callable[[dict[str, torch.Tensor]], object], name: str = SINGLE) -> Damage:
    """A weight file whose tensors `change` was done to, in place."""

    def damage(folder: Path):
        held = {key: tensor.clone() for key, tensor in load_file(folder / name).items()}
        change(held)
        save_file(held, folder / name, metadata={"format": "pt"})

    return damage


def _transpose_experts(held: dict[str, torch.Tensor]):
    for name in [name for name in held if ".mlp.experts." in name]:
        held[name] = held[name].mT.contiguous()


transposed_experts = tensors(_transpose_experts)  # as the authors of Qwen3-VL store them


def add(name: str, tensor: torch.Tensor) -> Damage:
    """One more tensor in the weight file."""
    return tensors(lambda held: held.update({name: tensor}))


def drop(name: str) -> Damage:
    """One tensor less in the weight file."""
    return tensors(lambda held: held.pop(name))


def replace(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Another tensor of a name."""
    return tensors(lambda held: held.update({name: change(held[name]).contiguous()}))


def in_order(*damages: Damage) -> Damage:
    """Several of them."""
    return lambda folder: [damage(folder) for damage in damages]


def pickle_only(folder: Path):
    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"no safetensors")


def loop(name: str) -> Damage:
    """A symbolic link to itself, which even root cannot read."""

    def damage(folder: Path):
        (folder / name).unlink()
        os.symlink(folder / name, folder / name)

    return damage


def deeper_than_config(held: dict[str, torch.Tensor]):
    """Tensors for the 32 layers that a llama has by default, and one of a 33rd."""
    layer = [(name, tensor) for name, tensor in held.items() if name.startswith("model.layers.0.")]
    for number in range(33):
        held |= {
            name.replace(".0.", f".{number}.", 1): tensor.clone()
            for name, tensor in layer[: 1 if number == 32 else None]
        }


def smaller_vocabulary(count: int) -> Damage:
    """A model of fewer tokens, its matrices included."""
    matrices = (
        replace(name, lambda tensor: tensor[:count]) for name in ("model.embed_tokens.weight", "lm_head.weight")
    )
    return in_order(config(vocab_size=count), *matrices)
