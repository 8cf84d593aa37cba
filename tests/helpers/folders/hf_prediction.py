"""Tensors of multi-token prediction as the published folders of DeepSeek-V3 and GLM-4.5 have them."""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.helpers.folders import hf_folders
from tests.helpers.folders.hf_damage import SINGLE, config, in_order, tensors

STORED = Path(__file__).parents[2] / "references" / "hf_prediction.json"
ROWS = [[(7 * i + 3) % 60 + 4 for i in range(37)], [5, 9, 12, 7, 30, 31, 8]]  # tokens of the stored numbers
MODULE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")  # types with a module of their own
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def add_layer(held: dict[str, torch.Tensor]) -> int:
    """One more layer like the last, its norms and projection, and copies of embedding and head; returns its number."""
    last = max(int(number) for name in held for number in re.findall(r"^model\.layers\.(\d+)\.", name))
    prefix, hidden = f"model.layers.{last + 1}.", held[EMBEDDING].shape[1]
    for name in [name for name in held if name.startswith(f"model.layers.{last}.")]:
        held[name.replace(f"model.layers.{last}.", prefix)] = held[name] + 0.5
    drawn, dtype = torch.Generator().manual_seed(7), held[EMBEDDING].dtype
    for name in ("enorm", "hnorm", "shared_head.norm"):
        held[f"{prefix}{name}.weight"] = torch.rand(hidden, generator=drawn).to(dtype)
    held[f"{prefix}eh_proj.weight"] = torch.rand(hidden, 2 * hidden, generator=drawn).to(dtype)
    held[f"{prefix}embed_tokens.weight"] = held[EMBEDDING].clone()
    held[f"{prefix}shared_head.head.weight"] = held[HEAD].clone()
    return last + 1


def add_module(held: dict[str, torch.Tensor]):
    """A prediction module as Qwen3-Next's and Qwen3.5's folders have it, its layer like the last one."""
    last = max(int(number) for name in held for number in re.findall(r"\.layers\.(\d+)\.", name))
    for name in [name for name in held if f".layers.{last}." in name]:
        held["mtp.layers.0." + name.partition(f".layers.{last}.")[2]] = held[name] + 0.5
    drawn = torch.Generator().manual_seed(7)
    (hidden,) = (held[name].shape[1] for name in held if re.search(r"embed(_tokens|dings)\.", name))
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        held[f"mtp.{name}.weight"] = torch.rand(hidden, generator=drawn)
    held["mtp.fc.weight"] = torch.rand(hidden, 2 * hidden, generator=drawn)


with_prediction = in_order(config(num_nextn_predict_layers=1), tensors(add_layer))


def of_case(case: str, folder: Path) -> Path:
    """Writes a case of `hf_folders` with a prediction layer."""
    hf_folders.write_folder(case, folder)
    is_module = hf_folders.stored(case)["config"]["model_type"] in MODULE
    (tensors(add_module) if is_module else with_prediction)(folder)
    return folder


def prediction_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the layers after the third of a folder's only file."""
    return {
        name: held for name, held in load_file(folder / SINGLE).items() if re.match(r"model\.layers\.[3-9]\.", name)
    }
