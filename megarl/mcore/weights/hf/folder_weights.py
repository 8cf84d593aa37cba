"""Loads a Hugging Face folder into a model of any layout, and writes a model of any layout as such a folder.

Each rank reads only its slices, without collectives. An export is one more weight transfer, whose destination is a
folder. Its tensors have the names, types and files of the folder that the model came from. Each file has one writer.
The folder cannot be loaded before the last rename: that of its index, or of its only weight file. The plan says what an
export consists of: the files with their tensors, the index, and config.json.
"""

import functools
import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore.weights.hf import folder as folders
from megarl.mcore.weights.hf.folder import (
    CONFIG,
    INDEX,
    SINGLE,
    FolderReader,
    Header,
    HFFolder,
    MappedFile,
    make_header,
    read_header,
    size_of,
    slices_of,
)
from megarl.mcore.weights.hf.hf_model import CLASSIFIER, LANGUAGE_MODEL
from megarl.mcore.weights.hf.quantized import CONFIG_ENTRY, FolderTensor, StoredTensor, dtype_of
from megarl.mcore.weights.reshard import WeightTransfer
from megarl.mcore.weights.reshard_plan import (
    BoxView,
    GlobalTensor,
    LocalWeights,
    WeightShard,
    merge_wholes,
    model_weights,
    overlap,
)

FILE_BYTES = 5 * 10**9  # maximum size of a new file's tensors, unless one tensor is larger
FP32_TENSORS = ("e_score_correction_bias",)  # rounding it changes the choice of experts
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")  # files that are not copied
NO_FILES: Mapping[str, bytes] = {}
COPIED_ELEMENTS = 2**21  # of a quantized tensor, at a time
PARTIAL = ".partial"  # suffix of a file that is being written

# Mapped bytes for each element that is read at a time: the numbers of a dequantized tensor add little to them.
BYTES_PER_ELEMENT = 64

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # name -> type and shape


@torch.no_grad()
def import_weights(weight_map, stages, pg_collection):
    """Fills a model's chunks from a folder that `WeightMap.check` has passed.

    A scalar head that the folder lacks keeps its initial value; rows that pad the vocabulary become 0. UsageError for a
    number that is not finite: a run would skip every update.
    """
    weights = model_weights(stages, pg_collection)
    for shard in weights.shards:
        if weight_map.is_vocabulary(shard.key):
            weights.view(shard).zero_()
    for view, stored, name in weight_map.read(weights):
        view.copy_(stored)
        # The ends show every NaN and infinity, without the memory of `isfinite`.
        if view.numel() and not torch.stack(torch.aminmax(view)).isfinite().all():
            dtype = str(view.dtype).removeprefix("torch.")
            raise weight_map.model.folder.error(f"{name} has a NaN or an infinity in {dtype}")


def read_rows(weights: LocalWeights, weight_map) -> Iterator[tuple[Tensor, Tensor, str]]:
    """Yields (a view of this rank's weights, what the folder has for it, the tensor's name), file by file, in boxes of
    whole rows and bounded size.

    What the folder has must not be kept: it is a view of the mapped file, or the fp32 numbers of a quantized tensor.
    """
    by_file, folder = defaultdict(list), weight_map.model.folder
    wholes, shards = weights.description()
    for shard in shards:
        rows, *rest = wholes[shard.key].shape[len(shard.index) :]
        for part in weight_map.ranges(shard.key, shard.index, rows):
            if box := overlap(part.box(rest), (shard.offset, shard.shape)):
                by_file[folder.weights[part.name].file].append((shard, part, *box))
    reader = FolderReader(folder)
    for file in sorted(by_file):
        for shard, part, (first, *others), (count, *columns) in by_file[file]:
            at_once = max(1, folders.MAPPED_BYTES // BYTES_PER_ELEMENT // max(1, math.prod(columns)))
            for start in range(0, count, at_once):
                offset, shape = (first + start, *others), (min(at_once, count - start), *columns)
                stored = part.view_of(functools.partial(reader.read, part.name), offset, shape)
                yield weights.view(shard, offset, shape), stored.reshape(shape), part.name
        reader.close()


# -- exports -----------------------------------------------------------------------------------------------------


class ExportPlan(NamedTuple):
    """The files of an export."""

    headers: dict[str, Header]  # of each weight file
    index: bytes | None  # type: ignore[assignment]  # of model.safetensors.index.json; None: there is one weight file
    config: bytes  # of config.json
    kept: Mapping[str, FolderTensor]  # tensors that the model does not use: those of the folder


def plan_export(weight_map, copies: Collection[str] = ()) -> ExportPlan:
    """Plans an export with the names, types and files of the folder that the model came from.

    A folder without weights, or with quantized ones, gives their types by its config.json, and new files. If the head
    differs, a scalar one for a vocabulary's, its tensor takes the place of the other.

    Args:
        copies: `WeightMap.shared_copies`.
    """
    folder, expected = weight_map.model.folder, weight_map.written(copies).expected()
    config, unchanged = _config(weight_map), (folder.path / CONFIG).read_bytes()
    kept: Mapping[str, FolderTensor] = {}
    if folder.has_weights and config is None and expected.keys() <= folder.weights.keys():
        headers = {file: read_header(folder.path / file) for file in folder.files()}
        kept = {
            name: StoredTensor(file, entry["dtype"], tuple(entry["shape"]))
            for file, header in headers.items()
            for name, entry in header.tensors.items()
            if name not in expected
        }
        index = folder.path / INDEX
        return ExportPlan(headers, index.read_bytes() if index.exists() else None, unchanged, kept)
    if folder.has_weights:
        kept = {x: tensor for x, tensor in folder.weights.items() if x not in expected and weight_map.keeps(x)}
    if folder.has_weights and CONFIG_ENTRY not in folder.config:
        headers = _changed_files(folder, expected, kept.keys())
    else:
        headers = _new_files(_types(folder, expected) | {name: each[1:3] for name, each in kept.items()})
    index = None if list(headers) == [SINGLE] else _index(headers)
    return ExportPlan(headers, index, unchanged if config is None else _json(config), kept)


def _config(weight_map) -> dict | None:
    """config.json of an export; None: the folder's own."""
    model, folder = weight_map.model, weight_map.model.folder
    changed = folder.config
    if CONFIG_ENTRY in changed:
        changed = {name: value for name, value in changed.items() if name != CONFIG_ENTRY}
    if weight_map.value_head != model.has_scalar_head:
        changed = _of_classifier(changed)
    if folder.has_weights and not weight_map.keeps_prediction and any(map(weight_map.is_prediction, folder.weights)):
        changed = model.prediction.without(changed)
    return None if changed is folder.config else changed


def _types(folder: HFFolder, shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """Type and shape of tensors that are written into new files."""
    dtype, stored = dtype_of(folder.config, folder.error), folder.weights if folder.has_weights else {}
    defaults = {name: "F32" if name.endswith(FP32_TENSORS) else dtype for name in shapes}
    return {x: (stored[x].dtype if x in stored else defaults[x], shape) for x, shape in shapes.items()}


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
    totals = {"total_parameters": count, "total_size": size}
    return _json({"metadata": totals, "weight_map": {name: file for name, (file, _) in entries.items()}})


def _of_classifier(config: dict) -> dict:
    """config.json of a language model's body with a scalar head."""
    names = [name.replace(LANGUAGE_MODEL, CLASSIFIER) for name in config.get("architectures") or []]
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "num_labels": 1}
    return config | labels | ({"architectures": names} if names else {})


def _json(content: dict) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def write_rows(written, weights: LocalWeights, wholes: dict[str, GlobalTensor], files, group):
    """Writes weights into the files of a rank, row by row; arguments as of `WeightMap.write`."""
    for names in written.names_without_copies():
        tensors = {name: file[name] for file in files.values() for name in names.intersection(file.names)}
        boxes: dict[WeightShard, BoxView] = {}
        for key, whole in wholes.items():
            for index in written.indices(key, whole.shape):
                rows, *rest = whole.shape[len(index) :]
                for part in written.ranges(key, index, rows):
                    if part.name in tensors:
                        view = functools.partial(part.view_of, tensors[part.name].__getitem__)
                        boxes[WeightShard(key, index, *part.box(rest))] = view
        WeightTransfer(weights, LocalWeights(wholes, boxes), group).run()


@torch.no_grad()
def export_weights(weight_map, stages, pg_collection, folder: Path, files: Mapping[str, bytes] = NO_FILES):
    """Writes a role's weights; a collective of the role.

    Args:
        weight_map: of the folder that the model came from, which also gives the files besides the weights.
        folder: to write; created, or overwritten if it exists. ValueError for the one that the model came from.
        files: content by name of files besides the weights that are not those of the model's folder.
    """
    group, source = pg_collection.intra_dist_opt, model_weights(stages, pg_collection)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if folder.resolve() == weight_map.model.folder.path.resolve():
        raise ValueError(f"{folder}: an export must not overwrite the folder that the model came from")
    if rank == 0:
        _prepare(folder)
    gathered: list[Any] = [None] * size
    own = (source.wholes, []), weight_map.shared_copies() if rank == 0 else []
    dist.all_gather_object(gathered, own, group=group)
    descriptions, (copies, *_) = zip(*gathered, strict=True)
    plan = plan_export(weight_map, copies)
    mine = [file for number, file in enumerate(plan.headers) if number % size == rank]
    weight_files = {file: MappedFile(folder / (file + PARTIAL), plan.headers[file]) for file in mine}
    wholes = merge_wholes("source", list(descriptions))
    weight_map.write(stages, source, wholes, weight_files, copies, group)
    for file in weight_files.values():
        _copy_kept(weight_map.model.folder, plan, file)
        file.flush()
    dist.barrier(group)
    if rank == 0:
        _publish(weight_map, plan, folder, files)
    dist.barrier(group)


def _copy_kept(source: HFFolder, plan: ExportPlan, file: MappedFile):
    """Copies what the model does not use: as it is, or the numbers that quantized tensors stand for."""
    kept = {name: plan.kept[name] for name in file.names if name in plan.kept}
    stored = {name: tensor.file for name, tensor in kept.items() if isinstance(tensor, StoredTensor)}
    for each in sorted(set(stored.values())):
        file.copy_from(source.path / each, [name for name, of in stored.items() if of == each])
    reader = FolderReader(source)
    for name in kept.keys() - stored.keys():
        written = file[name]
        for part in slices_of(kept[name].shape, COPIED_ELEMENTS):
            written[part] = reader.read(name, part)


def _prepare(folder: Path):
    """Makes an earlier export in the folder unloadable, its index first, and removes it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / INDEX, *folder.glob("*.safetensors"), *folder.glob(f"*{PARTIAL}")):
        path.unlink(missing_ok=True)


def _publish(weight_map, plan: ExportPlan, folder: Path, files: Mapping[str, bytes]):
    """Adds the files besides the weights, and gives the weight files their names; what makes it loadable is last."""
    for path in sorted(weight_map.model.folder.path.iterdir()):
        if path.is_file() and not path.name.endswith((*WEIGHTS, PARTIAL)) and path.name not in (CONFIG, INDEX):
            shutil.copyfile(path, folder / path.name)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / CONFIG).write_bytes(plan.config)
    for file in plan.headers:
        os.replace(folder / (file + PARTIAL), folder / file)
    if plan.index is not None:
        (folder / (INDEX + PARTIAL)).write_bytes(plan.index)
        os.replace(folder / (INDEX + PARTIAL), folder / INDEX)
