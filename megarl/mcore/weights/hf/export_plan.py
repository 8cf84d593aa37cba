"""What an export consists of: the files with their tensors, the index, and config.json."""

import json
import math
from typing import NamedTuple

from megarl.mcore.weights.hf.folder import CONFIG, INDEX, SINGLE
from megarl.mcore.weights.hf.hf_model import CLASSIFIER, LANGUAGE_MODEL
from megarl.mcore.weights.hf.safetensors_file import DTYPES, Header, make_header, read_header
from megarl.mcore.weights.hf.weight_map import WeightMap

FILE_BYTES = 5 * 10**9  # maximum size of a new file's tensors, unless one tensor is larger
CONFIG_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
FP32_TENSORS = ("e_score_correction_bias",)  # rounding it changes the choice of experts

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # name -> type and shape


class ExportPlan(NamedTuple):
    """The files of an export."""

    headers: dict[str, Header]  # of each weight file
    index: bytes | None  # type: ignore[assignment]  # of model.safetensors.index.json; None: there is one weight file
    config: bytes  # of config.json
    unused: frozenset[str] = frozenset()  # tensors of the folder that the model does not use, copied as they are


def plan_export(weight_map: WeightMap) -> ExportPlan:
    """Plans an export with the names, types and files of the folder that the model came from.

    A folder without weights gives the types by its config.json, and new files. If the head differs, a scalar one for a
    vocabulary's, its tensor takes the place of the other.
    """
    folder, expected = weight_map.model.folder, weight_map.written().expected()
    config = (folder.path / CONFIG).read_bytes()
    if weight_map.value_head != weight_map.model.has_scalar_head:
        config = _classifier_config(folder.config)
    if not folder.has_weights:
        headers = _new_files(expected, _dtype(weight_map))
    elif expected.keys() <= folder.tensors.keys():
        headers = {file: read_header(folder.path / file) for file in folder.files()}
        index, names = folder.path / INDEX, (name for header in headers.values() for name in header.tensors)
        unused = frozenset(names) - expected.keys()
        return ExportPlan(headers, index.read_bytes() if index.exists() else None, config, unused)
    else:
        headers = _changed_files(weight_map, expected)
    return ExportPlan(headers, None if list(headers) == [SINGLE] else _index(headers), config)


def _dtype(weight_map: WeightMap) -> str:
    folder = weight_map.model.folder
    name = folder.config.get("dtype") or folder.config.get("torch_dtype") or "bfloat16"
    if name not in CONFIG_DTYPES:
        raise folder.error(f"config.json: dtype {name!r}: allowed are {', '.join(CONFIG_DTYPES)}")
    return CONFIG_DTYPES[name]


def _new_files(shapes: dict[str, tuple[int, ...]], dtype: str) -> dict[str, Header]:
    """Fills files in the order of the layers."""
    files, room = [], 0
    for name, shape in shapes.items():
        of_tensor = "F32" if name.endswith(FP32_TENSORS) else dtype
        size = math.prod(shape) * DTYPES[of_tensor].itemsize
        if size > room:
            files.append({})
            room = FILE_BYTES
        files[-1][name] = of_tensor, shape
        room -= size
    if len(files) == 1:
        return {SINGLE: make_header(files[0])}
    names = (f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1))
    return dict(zip(names, map(make_header, files), strict=True))


def _changed_files(weight_map: WeightMap, shapes: dict[str, tuple[int, ...]]) -> dict[str, Header]:
    """The folder's files without the tensors that are not written; new ones join the last file."""
    stored = weight_map.model.folder.tensors
    kept = {name: tensor for name, tensor in stored.items() if name in shapes}
    files: dict[str, Tensors] = {file: {} for file in sorted({tensor.file for tensor in kept.values()})}
    for name, tensor in kept.items():
        files[tensor.file][name] = tensor.dtype, tensor.shape
    last = list(files)[-1]
    for name in shapes.keys() - kept.keys():
        files[last][name] = next(iter(files[last].values()))[0], shapes[name]
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
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _classifier_config(config: dict) -> bytes:
    """config.json of a language model's body with a scalar head."""
    names = [name.replace(LANGUAGE_MODEL, CLASSIFIER) for name in config.get("architectures") or []]
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1}
    changed = config | labels | ({"architectures": names} if names else {})
    return (json.dumps(changed, indent=2, sort_keys=True) + "\n").encode()
