"""Multimodal Hugging Face folders: damaged ones, and what is refused with them, in one line."""

import pytest
import torch

from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_damage import argv, config, tensors, text_config
from tests.helpers.forked_programs import check
from tests.helpers.programs import write_lines
from tests.helpers.tiers import by_default


def plain_names(held: dict[str, torch.Tensor]):
    """The names of a folder of text alone."""
    for name in [name for name in held if name.startswith("model.language_model.")]:
        held[name.replace("language_model.", "")] = held.pop(name)


MULTIMODAL = {
    "no text": (config(text_config=None), ["text_config None: allowed is an object"]),
    "another text model": (text_config(model_type="llama"), ["model_type 'llama': allowed is 'qwen3_vl_text'"]),
    "another class": (config(architectures=["Qwen3VLModel"]), ["['Qwen3VLModel']", "…ForConditionalGeneration"]),
    "classes a text": (config(architectures="x"), ["architectures 'x': allowed is …ForConditionalGeneration"]),
    "tying a text": (config(tie_word_embeddings="no"), ["transformers cannot read it", "'tie_word_embeddings'"]),
    "tied with another head": (config(tie_word_embeddings=True), ["ties lm_head.weight", "but row 0 differs"]),
    "missing tensor": (tensors(lambda held: held.pop("model.language_model.norm.weight")),
                       ["model.language_model.norm.weight is missing"]),
    "names of text": (tensors(plain_names), ["model.language_model.embed_tokens.weight is missing"]),
    "unknown tower": (tensors(lambda held: held.update({"model.audio.x": torch.ones(2)})), ["audio.x is a tensor"]),
    "layer after the last": (text_config(num_hidden_layers=2), ["model.language_model.layers.2.", "after those of"]),
}  # fmt: skip


@pytest.mark.parametrize("name", by_default(MULTIMODAL, ["no text", "unknown tower"]))
def test_damaged_multimodal_folders(name, tmp_path):
    damage, needles = MULTIMODAL[name]
    folder = hf_folders.write_folder("qwen3_vl", tmp_path / "folder")
    damage(folder)
    status, printed, others = check(argv(tmp_path, folder), "sft", size=2)
    line = others.splitlines()[-1]
    assert (status, printed) == (2, "") and all(needle in line for needle in [f"--hf-model {folder}", *needles]), line


UNFIT = {
    "a score": ("reward", "--export-hf", "exports with a scalar head are those of language models"),
    "gates and an exported adapter": ("sft", "--lora-rank 2 --export-peft", "gates of attention in tensors"),
}


@pytest.mark.parametrize("name", by_default(UNFIT, ["a score", "gates and an exported adapter"]))
def test_what_some_folders_cannot_do(name, tmp_path):
    program, flags, needle = UNFIT[name]
    folder = hf_folders.write_folder("afmoe" if "gates" in name else "qwen3_vl", tmp_path / "folder")
    status, _, others = check(argv(tmp_path, folder, program, flags.format(tmp_path)), program)
    assert status == 2 and needle.format(tmp_path) in others.splitlines()[-1], others


def test_prompts_with_images_are_refused(tmp_path):
    folder = hf_folders.write_folder("qwen3_vl", tmp_path / "folder")
    command = argv(tmp_path, folder)
    parts = [{"type": "image", "image": "x.png"}, {"type": "text", "text": "What is it?"}]
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": [{"role": "user", "content": parts}], "answer": "2"}])
    status, _, others = check(command, "sft")
    assert status == 2 and "has images; --hf-model" in others.splitlines()[-1], others
