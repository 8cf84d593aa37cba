"""What an export consists of: the files with their tensors, the index, and config.json."""

import json
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

from megarl.mcore.weights.hf.folder import CONFIG, INDEX, SINGLE, HFFolder
from megarl.mcore.weights.hf.hf_model import CLASSIFIER, LANGUAGE_MODEL
from megarl.mcore.weights.hf.quantized import CONFIG_ENTRY, dtype_of
from megarl.mcore.weights.hf.safetensors_file import Header, make_header, read_header, size_of
from megarl.mcore.weights.hf.stored_tensors import FolderTensor, StoredTensor
from megarl.mcore.weights.hf.weight_map import WeightMap

FILE_BYTES = 5 * 10**9  # maximum size of a new file's tensors, unless one tensor is larger
FP32_TENSORS = ("e_score_correction_bias",)  # rounding it changes the choice of experts

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # name -> type and shape


class ExportPlan(NamedTuple):
    """The files of an export."""

    headers: dict[str, Header]  # of each weight file
    index: bytes | None  # type: ignore[assignment]  # of model.safetensors.index.json; None: there is one weight file
    config: bytes  # of config.json
    kept: Mapping[str, FolderTensor]  # tensors that the model does not use: those of the folder


def plan_export(weight_map: WeightMap, copies: Collection[str] = ()) -> ExportPlan:
    """Plans an export with the names, types and files of the folder that the model came from.

    A folder without weights, or with quantized ones, gives their types by its config.json, and new files. If the head
    differs, a scalar one for a vocabulary's, its tensor takes the place of the other.

    Args:
        copies: `WeightMap.shared_copies`.
    """
    folder, expected = weight_map.model.folder, weight_map.written(copies).expected()
    config = _config(weight_map)
    kept: Mapping[str, FolderTensor] = {}
    if folder.has_weights and config is None and expected.keys() <= folder.weights.keys():
        headers = {file: read_header(folder.path / file) for file in folder.files()}
        kept = {
            name: StoredTensor(file, entry["dtype"], tuple(entry["shape"]))
            for file, header in headers.items() for name, entry in header.tensors.items() if name not in expected
        }  # fmt: skip
        index = folder.path / INDEX
        return ExportPlan(headers, index.read_bytes() if index.exists() else None, _bytes_of(folder), kept)
    if folder.has_weights:
        kept = {
            name: tensor for name, tensor in folder.weights.items() if name not in expected and weight_map.keeps(name)
        }
    if folder.has_weights and CONFIG_ENTRY not in folder.config:
        headers = _changed_files(folder, expected, kept.keys())
    else:
        headers = _new_files(_types(folder, expected) | {name: each[1:3] for name, each in kept.items()})
    index = None if list(headers) == [SINGLE] else _index(headers)
    return ExportPlan(headers, index, _bytes_of(folder) if config is None else _json(config), kept)


def _bytes_of(folder: HFFolder) -> bytes:
    return (folder.path / CONFIG).read_bytes()


def _config(weight_map: WeightMap) -> dict | None:
    """config.json of an export; None: the folder's own."""
    model, folder = weight_map.model, weight_map.model.folder
    changed = folder.config
    if CONFIG_ENTRY in changed:
        changed = {name: value for name, value in changed.items() if name != CONFIG_ENTRY}
    if weight_map.value_head != model.has_scalar_head:
        changed = _of_classifier(changed)
    if folder.has_weights and not all(
        weight_map.keeps(name) for name in folder.weights if weight_map.is_prediction(name)
    ):
        changed = model.prediction.without(changed)
    return None if changed is folder.config else changed


def _types(folder: HFFolder, shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """Type and shape of tensors that are written into new files."""
    dtype, found = dtype_of(folder.config, folder.error), {}
    stored = folder.weights if folder.has_weights else {}
    for name, shape in shapes.items():
        default = "F32" if name.endswith(FP32_TENSORS) else dtype
        found[name] = stored[name].dtype if name in stored else default, shape
    return found


def _new_files(tensors: Tensors) -> dict[str, Header]:
    """Fills files in the order of the layers."""
    files, room = [], 0
    for name, tensor in tensors.items():
        size = size_of(*tensor)
        if size > room:
            files.append({})
            room = FILE_BYTES
        files[-1][name] = tensor
        room -= size
    if len(files) == 1:
        return {SINGLE: make_header(files[0])}
    names = (f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1))
    return dict(zip(names, map(make_header, files), strict=True))


def _changed_files(folder: HFFolder, shapes: dict[str, tuple[int, ...]], kept: Collection[str]) -> dict[str, Header]:
    """The folder's files without the tensors that are not written; new ones join the last file."""
    stored = folder.weights
    found = {name: tensor for name, tensor in stored.items() if name in shapes or name in kept}
    files: dict[str, Tensors] = {file: {} for file in sorted({tensor.file for tensor in found.values()})}
    for name, tensor in found.items():
        files[tensor.file][name] = tensor.dtype, tensor.shape
    last, dtype = list(files)[-1], next(tensor.dtype for name, tensor in found.items() if name in shapes)
    for name in shapes.keys() - found.keys():
        files[last][name] = dtype, shapes[name]
    return {file: make_header(tensors) for file, tensors in files.items()}


def _index(headers: dict[str, Header]) -> bytes:
    """model.safetensors.index.json as transformers writes it."""
    entries = {name: (file, entry) for file, header in headers.items() for name, entry in header.tensors.items()}
    count = sum(math.prod(entry["shape"]) for _, entry in entries.values())
    size = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for _, entry in entries.values())
    index = {
        "metadata": {"total_parameters": count, "total_size": size},
        "weight_map": {name: file for name, (file, _) in entries.items()},
    }
    return _json(index)


def _of_classifier(config: dict) -> dict:
    """config.json of a language model's body with a scalar head."""
    names = [name.replace(LANGUAGE_MODEL, CLASSIFIER) for name in config.get("architectures") or []]
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1}
    return config | labels | ({"architectures": names} if names else {})


def _json(content: dict) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
