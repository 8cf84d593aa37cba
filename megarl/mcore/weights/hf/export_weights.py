"""Writes a model of any layout as a Hugging Face folder: one more weight transfer, whose destination is a folder.

Tensors have the names, types and files of the folder that the model came from. Each file has one writer. The folder
cannot be loaded before the last rename: that of its index, or of its only weight file.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.mcore.weights.hf.export_plan import ExportPlan, plan_export
from megarl.mcore.weights.hf.folder import CONFIG, INDEX, HFFolder
from megarl.mcore.weights.hf.folder_reader import FolderReader, slices_of
from megarl.mcore.weights.hf.mapping import RowRange
from megarl.mcore.weights.hf.safetensors_file import MappedFile
from megarl.mcore.weights.hf.stored_tensors import StoredTensor
from megarl.mcore.weights.hf.weight_map import WeightMap
from megarl.mcore.weights.reshard import WeightTransfer
from megarl.mcore.weights.reshard_plan import (
    Coordinates,
    GlobalTensor,
    LocalWeights,
    ShardDescription,
    WeightShard,
    merge_wholes,
)

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")  # files that are not copied
NO_FILES: Mapping[str, bytes] = {}
COPIED_ELEMENTS = 2**21  # of a quantized tensor, at a time
PARTIAL = ".partial"  # suffix of a file that is being written


class _WrittenFiles:
    """Tensors in the files that this rank writes, as the destination of a weight transfer."""

    def __init__(
        self, weight_map: WeightMap, wholes: dict[str, GlobalTensor], files: dict[str, MappedFile], names: set[str]
    ):
        """`weight_map`: of the written folder; `wholes`: Megatron's tensors on all ranks; `files`: by name.

        `names`: of the tensors, of which no two have the same weights.
        """
        self.wholes = wholes
        self._shards: dict[WeightShard, tuple[RowRange, MappedFile]] = {}
        tensors = {name: file for file in files.values() for name in names.intersection(file.names)}
        for key, whole in wholes.items():
            for index in weight_map.indices(key, whole.shape):
                rows, *rest = whole.shape[len(index) :]
                for part in weight_map.ranges(key, index, rows):
                    if part.name in tensors:
                        self._shards[WeightShard(key, index, *part.box(rest))] = part, tensors[part.name]

    def description(self) -> ShardDescription:
        """Returns the description that other ranks need for the plan."""
        return ShardDescription(self.wholes, list(self._shards))

    def view(self, shard: WeightShard, offset: Coordinates | None = None, shape: Coordinates | None = None) -> Tensor:
        """Returns a view of a box of a file."""
        part, file = self._shards[shard]
        return part.view_of(file[part.name], offset or shard.offset, shape or shard.shape)


@torch.no_grad()
def export_weights(weight_map: WeightMap, stages, pg_collection, folder: Path, files: Mapping[str, bytes] = NO_FILES):
    """Writes a role's weights; a collective of the role.

    Args:
        weight_map: of the folder that the model came from, which also gives the files besides the weights.
        stages: the model's chunks on this rank.
        folder: to write; created, or overwritten if it exists.
        files: content by name of files besides the weights that are not those of the model's folder.

    Raises:
        ValueError: the folder is the one that the model came from.
    """
    group, source = pg_collection.intra_dist_opt, LocalWeights(stages, pg_collection)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if folder.resolve() == weight_map.model.folder.path.resolve():
        raise ValueError(f"{folder}: an export must not overwrite the folder that the model came from")
    if rank == 0:
        _prepare(folder)
    gathered: list[Any] = [None] * size
    own = source.description()._replace(shards=[]), weight_map.shared_copies() if rank == 0 else []
    dist.all_gather_object(gathered, own, group=group)
    descriptions, (copies, *_) = zip(*gathered, strict=True)
    plan = plan_export(weight_map, copies)
    mine = [file for number, file in enumerate(plan.headers) if number % size == rank]
    weight_files = {file: MappedFile(folder / (file + PARTIAL), plan.headers[file]) for file in mine}
    written, wholes = weight_map.written(copies), merge_wholes("source", list(descriptions))
    for names in written.names_without_copies():
        WeightTransfer(source, _WrittenFiles(written, wholes, weight_files, names), group).run()
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
            written[part] = reader[name][part]


def _prepare(folder: Path):
    """Makes an earlier export in the folder unloadable, its index first, and removes it."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / INDEX, *folder.glob("*.safetensors"), *folder.glob(f"*{PARTIAL}")):
        path.unlink(missing_ok=True)


def _publish(weight_map: WeightMap, plan: ExportPlan, folder: Path, files: Mapping[str, bytes]):
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
