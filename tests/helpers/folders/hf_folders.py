"""Folders of small Hugging Face models, and the numbers that transformers computes from them.

`tests/references/hf_models/CASE.json` says what a folder holds: configurations, names, types and shapes of the
tensors. The weights are not stored: they are drawn from the tensors' names.
"""

import bisect
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from tests.helpers.texts import small_tokenizers

STORED = Path(__file__).parents[2] / "references" / "hf_models"
CASES = sorted(path.stem for path in STORED.glob("*.json"))

# Of the matrices' uniform numbers: a standard deviation of 0.1.
MATRIX_SCALE = 0.175
# Weights of recurrent layers by name: half the width, and the middle.
RECURRENT = {"conv1d.weight": (0.5, 0.5), "A_log": (1, -1), "dt_bias": (2, -3), "norm.weight": (0.2, 0.5),
             "out_proj.weight": (0.03, 0),  # so small that fp32 is precise
             "D": (0.5, 0.5), "conv1d.bias": (0.2, 0)}  # fmt: skip


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file: `dtype` is that of the file's header (F32, BF16).

    Tensors of one `block` are views of one tensor of the model (the experts of a layer): they stay in one file.
    """

    name: str
    dtype: str
    shape: list[int]
    block: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * {"F32": 4, "BF16": 2}[self.dtype]


class Reference(NamedTuple):
    """What transformers computes in fp32, and what its `save_pretrained` writes.

    `tensors` are in the order in which transformers divides them among files; `weights_hash` is `hash_of` them. A model
    for text has `logprobs` and what follows, the others None: of each sequence of `tokens` (n ids) the log-probs of its
    tokens from the second on [n - 1]; `last_logprobs`: of every token after the first sequence [vocabulary]; the
    `greedy` continuation (64 ids, no end token) of `prompt`, whose best token leads the second by `margin` or more. A
    model with a scalar head has the `scores` [2] at the last tokens instead.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tensors: list[StoredTensor]
    parameters: int
    weights_hash: str
    tokens: list[list[int]]
    logprobs: list[torch.Tensor] | None
    last_logprobs: torch.Tensor | None
    prompt: list[int] | None
    greedy: list[int] | None
    margin: float | None
    scores: torch.Tensor | None
    transformers: str


def stored(case: str) -> dict[str, Any]:
    """The content of a case's file; one that says `same_as` has a configuration of its own and the rest of another."""
    content = json.loads((STORED / f"{case}.json").read_text())
    return stored(content.pop("same_as")) | content if "same_as" in content else content


def reference(case: str) -> Reference:
    """The stored numbers of a case, as tensors of fp64."""

    def tensor(numbers):
        return torch.tensor(numbers, dtype=torch.float64)

    content = dict.fromkeys(Reference._fields) | stored(case)
    content["tensors"] = [StoredTensor(*each) for each in content["tensors"]]
    for name in ("last_logprobs", "scores"):
        content[name] = content[name] and tensor(content[name])
    content["logprobs"] = content["logprobs"] and [tensor(each) for each in content["logprobs"]]
    return Reference(**content)


# -- weights -----------------------------------------------------------------------------------------------------


def uniform(name: str, shape: list[int]) -> np.ndarray:
    """fp32 in [-1, 1) from a counter-based generator with the name as its key: multiples of 2**-23, thus exact."""
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    drawn = np.random.Philox(key=key).random_raw(math.prod(shape)) >> np.uint64(40)
    return ((drawn.astype(np.float32) - np.float32(2**23)) / np.float32(2**23)).reshape(shape)


def draw(tensor: StoredTensor, zero_centred: bool) -> torch.Tensor:
    """Biases and sinks in ±0.2, norms in 1 ± 0.2 (`zero_centred`: ±0.2), matrices in ±MATRIX_SCALE; of recurrent layers
    those of `RECURRENT`."""
    numbers = uniform(tensor.name, tensor.shape)
    kind = re.sub(r".*\.(linear_attn|mixer|self_attn|attention)\.([qkv]_(?=conv1d))?", "", tensor.name)
    if kind in RECURRENT:
        scale, offset = RECURRENT[kind]
        drawn = numbers * np.float32(scale) + np.float32(offset)
    elif "norm" in tensor.name:
        drawn = numbers * np.float32(0.2) + np.float32(0 if zero_centred else 1)
    elif tensor.name.endswith(("bias", "sinks")):
        drawn = numbers * np.float32(0.2)
    else:
        drawn = numbers * np.float32(MATRIX_SCALE)
    return torch.from_numpy(drawn).to({"F32": torch.float32, "BF16": torch.bfloat16}[tensor.dtype])


def weights_of(content: dict[str, Any]) -> dict[str, torch.Tensor]:
    zero_centred = content["config"]["model_type"].startswith(("gemma", "qwen3_next", "qwen3_5"))
    return {name: draw(StoredTensor(name, *rest), zero_centred) for name, *rest in content["tensors"]}


def weights(case: str) -> dict[str, torch.Tensor]:
    """The tensors of a case's files by name."""
    return weights_of(stored(case))


def hash_of(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of names and bytes, in the names' order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + b"\0" + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# -- folders -----------------------------------------------------------------------------------------------------


def write_folder(case: str, folder: Path, files: int = 1) -> Path:
    """Write a case as `save_pretrained` does, its weights in so many files, with a tokenizer; `folder` must not exist.

    Raises:
        ValueError: transformers cannot divide these tensors among so many files.
    """
    return write(stored(case), folder, files)


def write(content: dict[str, Any], folder: Path, files: int = 1) -> Path:
    small_tokenizers.characters(folder)
    _write_json(folder / "config.json", content["config"])
    if content.get("generation_config"):
        _write_json(folder / "generation_config.json", content["generation_config"])
    listed = [StoredTensor(*each) for each in content["tensors"]]
    divided = divide(listed, largest_file(listed, files))
    names = [f"model-{number:05d}-of-{files:05d}.safetensors" for number in range(1, files + 1)]
    if files == 1:
        names = ["model.safetensors"]
    tensors = weights_of(content)
    for name, part in zip(names, divided, strict=True):
        save_file({tensor.name: tensors[tensor.name] for tensor in part}, folder / name, metadata={"format": "pt"})
    if files > 1:
        total = {"total_parameters": content["parameters"], "total_size": _bytes(listed)}
        places = {tensor.name: name for name, part in zip(names, divided, strict=True) for tensor in part}
        _write_json(folder / "model.safetensors.index.json", {"metadata": total, "weight_map": places})
    return folder


def divide(tensors: list[StoredTensor], largest: int) -> list[list[StoredTensor]]:
    """The tensors of each file of at most `largest` bytes, as `huggingface_hub` divides them: in order, blocks whole.

    `largest` holds every block.
    """
    files, size = [[]], 0
    for _, block in itertools.groupby(tensors, key=lambda tensor: tensor.block):
        block = list(block)
        if size + _bytes(block) > largest:
            files.append([])
            size = 0
        files[-1] += block
        size += _bytes(block)
    return files


def largest_file(tensors: list[StoredTensor], files: int) -> int:
    """The smallest limit in bytes by which transformers (`max_shard_size`) writes that many files.

    Raises:
        ValueError: there is none.
    """
    blocks = [_bytes(block) for _, block in itertools.groupby(tensors, key=lambda tensor: tensor.block)]
    limits = range(max(blocks), sum(blocks) + 1)
    found = bisect.bisect_left(limits, -files, key=lambda limit: -len(divide(tensors, limit)))
    if found == len(limits) or len(divide(tensors, limits[found])) != files:
        raise ValueError(f"{len(tensors)} tensors cannot be divided among {files} files")
    return limits[found]


def _bytes(tensors: Iterable[StoredTensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
