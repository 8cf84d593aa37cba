"""Loads a Hugging Face folder into a model of any layout: each rank reads only its slices, without collectives."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from megarl.mcore.weights.hf.weight_map import WeightMap
from megarl.mcore.weights.reshard_plan import Coordinates, LocalWeights, WeightShard, overlap

# Bytes read from a file before its mapping is released: pages of a mapped file count as memory of the process.
MAPPED_BYTES = 64 * 2**20


class StoredBox(NamedTuple):
    """A box of a shard, and the slices of the folder's tensor that it equals."""

    shard: WeightShard
    offset: Coordinates
    shape: Coordinates
    name: str
    slices: tuple[slice, ...]


def stored_boxes(weights: LocalWeights, weight_map: WeightMap) -> Iterator[StoredBox]:
    """Yields what this rank reads from the folder, or would write to it."""
    wholes, shards = weights.description()
    for shard in shards:
        rows, *rest = wholes[shard.key].shape[len(shard.index) :]
        for part in weight_map.ranges(shard.key, shard.index, rows):
            box = overlap(((part.row, *[0] * len(rest)), (part.rows, *rest)), (shard.offset, shard.shape))
            if box is not None:
                offset, shape = box
                start = (offset[0] - part.row + part.source_row, *offset[1:])
                slices = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
                yield StoredBox(shard, offset, shape, part.name, slices)


@torch.no_grad()
def import_weights(weight_map: WeightMap, stages, pg_collection):
    """Fills a model's chunks from a folder that `WeightMap.check` has passed.

    A scalar head that the folder lacks keeps its initial value; rows that pad the vocabulary become 0.
    """
    weights, by_file = LocalWeights(stages, pg_collection), defaultdict(list)
    tensors = weight_map.model.folder.tensors
    padding = {shard for shard in weights.description().shards if weight_map.is_vocabulary(shard.key)}
    for shard in padding:
        weights.view(shard).zero_()
    for box in stored_boxes(weights, weight_map):
        by_file[tensors[box.name].file].append(box)
    for file in sorted(by_file):
        reader = _Reader(weight_map.model.folder.path / file)
        for box in by_file[file]:
            reader.copy(box, weights.view(box.shard, box.offset, box.shape))
        reader.close()


class _Reader:
    """Copies slices of one file's tensors, with a bounded part of the file mapped at a time."""

    def __init__(self, path):
        self.path, self._stored, self._mapped = path, None, 0

    def copy(self, box: StoredBox, target: Tensor):
        """Copies a box row by row group into memory of any type and device."""
        rows = max(1, MAPPED_BYTES // 4 // max(1, target[0].numel() * 4)) if target.dim() else 1
        first, *rest = box.slices
        for start in range(first.start, first.stop, rows):
            stop = min(start + rows, first.stop)
            self._copy(box.name, (slice(start, stop), *rest), target[start - first.start : stop - first.start])

    def _copy(self, name: str, slices: tuple[slice, ...], target: Tensor):
        if self._stored is None:
            self._stored, self._mapped = safe_open(self.path, framework="pt"), 0
        source = self._stored.get_slice(name)
        stored = source[slices]
        target.copy_(stored.view(target.shape))
        # Slices of columns map the pages of whole rows.
        self._mapped += len(stored) * source.get_shape()[-1] * stored.element_size()
        del source, stored
        if self._mapped >= MAPPED_BYTES:
            self.close()

    def close(self):
        """Releases the mapping."""
        self._stored = None
