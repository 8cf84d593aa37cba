"""Loads a Hugging Face folder into a model of any layout: each rank reads only its slices, without collectives."""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megarl.mcore.weights.hf import folder as folders
from megarl.mcore.weights.hf.mapping import RowRange
from megarl.mcore.weights.reshard_plan import Coordinates, LocalWeights, WeightShard, overlap

# Mapped bytes for each element of a box: the numbers of a dequantized one add little to them.
BYTES_PER_ELEMENT = 64


class StoredBox(NamedTuple):
    """A box of a shard, and the rows of the folder's tensor in which it lies."""

    shard: WeightShard
    offset: Coordinates
    shape: Coordinates
    rows: RowRange

    def view_of(self, weights: LocalWeights) -> Tensor:
        """The box of this rank's weights."""
        return weights.view(self.shard, self.offset, self.shape)

    def split(self, elements: int) -> Iterator["StoredBox"]:
        """Yields it in parts of whole rows, at most `elements` each if a row is not larger."""
        rows = max(1, elements * self.shape[0] // max(1, math.prod(self.shape)))
        for start in range(0, self.shape[0], rows):
            count = min(rows, self.shape[0] - start)
            yield self._replace(offset=(self.offset[0] + start, *self.offset[1:]), shape=(count, *self.shape[1:]))


def stored_boxes(weights: LocalWeights, weight_map) -> Iterator[StoredBox]:
    """Yields what this rank reads from the folder."""
    wholes, shards = weights.description()
    for shard in shards:
        rows, *rest = wholes[shard.key].shape[len(shard.index) :]
        for part in weight_map.ranges(shard.key, shard.index, rows):
            box = overlap(part.box(rest), (shard.offset, shard.shape))
            if box is not None:
                yield StoredBox(shard, *box, part)


@torch.no_grad()
def import_weights(weight_map, stages, pg_collection):
    """Fills a model's chunks from a folder that `WeightMap.check` has passed.

    A scalar head that the folder lacks keeps its initial value; rows that pad the vocabulary become 0. UsageError for a
    number that is not finite: a run would skip every update.
    """
    weights = LocalWeights(stages, pg_collection)
    for shard in weights.description().shards:
        if weight_map.is_vocabulary(shard.key):
            weights.view(shard).zero_()
    for view, stored, name in weight_map.read(weights):
        view.copy_(stored)
        # The ends show every NaN and infinity, without the memory of `isfinite`.
        if view.numel() and not torch.stack(torch.aminmax(view)).isfinite().all():
            dtype = str(view.dtype).removeprefix("torch.")
            raise weight_map.model.folder.error(f"{name} has a NaN or an infinity in {dtype}")


def read_boxes(weights: LocalWeights, weight_map) -> Iterator[tuple[StoredBox, Tensor]]:
    """Yields everything that this rank needs of the folder, file by file, in boxes of bounded size.

    A tensor must not be kept: it is a view of the mapped file, or the fp32 numbers of a quantized one.
    """
    by_file, folder = defaultdict(list), weight_map.model.folder
    for box in stored_boxes(weights, weight_map):
        by_file[folder.weights[box.rows.name].file].append(box)
    reader = folders.FolderReader(folder)
    for file in sorted(by_file):
        for box in by_file[file]:
            for part in box.split(folders.MAPPED_BYTES // BYTES_PER_ELEMENT):
                stored = part.rows.view_of(reader[part.rows.name], part.offset, part.shape)
                yield part, stored.reshape(part.shape)
        reader.close()
