"""Megatron-core's layout of gradient buffers: padding, buckets, and each rank's share of them."""

import itertools
import math
from typing import NamedTuple

import numpy as np

from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.mcore.model.weight_table import Weight

ALIGNMENT, BUCKET_ALIGNMENT = 64, 128  # elements; the distributed optimizer's padding
MIN_BUCKET, BUCKET_PER_REPLICA = 40_000_000, 1_000_000  # elements of a bucket with --overlap-grad-reduce


class GradientBuffer(NamedTuple):
    """The contiguous gradients of one dtype and reducing group, in elements."""

    first: np.ndarray  # [weights] where each begins
    last: np.ndarray  # [weights] where each ends
    buckets: np.ndarray  # [buckets, 2] where each begins and ends
    itemsize: int
    ranks: int  # data-parallel ranks that reduce it

    @property
    def elements(self) -> int:
        """Elements, with padding."""
        return int(self.buckets[-1, 1])

    def shares(self) -> np.ndarray:
        """[ranks] elements of each rank's shares of all buckets, without padding."""
        edges = self._edges()
        weight = np.searchsorted(self.first, edges, side="right") - 1  # in which an edge is, or before whose padding
        filled = np.concatenate(([0], np.cumsum(self.last - self.first)))
        before = filled[weight] + np.minimum(edges - self.first[weight], self.last[weight] - self.first[weight])
        return np.diff(before, axis=1).sum(0)

    def shares_of_weights(self) -> np.ndarray:
        """[ranks, weights] elements of each rank's share of each weight."""
        edges = self._edges()[np.searchsorted(self.buckets[:, 1], self.last)].T  # a weight is in one bucket
        return (np.minimum(self.last, edges[1:]) - np.maximum(self.first, edges[:-1])).clip(0)

    def _edges(self) -> np.ndarray:
        """[buckets, ranks + 1] borders of the ranks' shares of each bucket."""
        begins, ends = self.buckets.T
        return np.linspace(begins, ends, self.ranks + 1, dtype=np.int64, axis=1)


def _round_up(value, multiple: int):
    return -(-value // multiple) * multiple


def buffers(weights: list[Weight], args, first_stage: bool) -> list[GradientBuffer]:
    """Gradient buffers of a model chunk: one for each dtype and reducing group, weights in reverse order."""
    sizes, laid_out = parallel_sizes(args), []
    replicas, dense = sizes.data(args.world_size), sizes.data(args.world_size) * sizes.context
    limit = None
    if args.overlap_grad_reduce and first_stage:
        limit = args.ddp_bucket_size or max(MIN_BUCKET, BUCKET_PER_REPLICA * replicas)
    for itemsize, is_expert in dict.fromkeys((w.itemsize, w.is_expert) for w in weights):
        members = [w for w in weights if (w.itemsize, w.is_expert) == (itemsize, is_expert)]
        ranks = sizes.expert_data(args.world_size) if is_expert else dense
        laid_out.append(GradientBuffer(*_lay_out(members[::-1], limit, ranks, args), itemsize, ranks))
    return laid_out


def _lay_out(weights: list[Weight], limit: int | None, ranks: int, args) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first, last, buckets) of a gradient buffer; a bucket ends at `limit` elements, a tied embedding has its own."""
    pads = args.use_distributed_optimizer
    unit = math.lcm(ranks, BUCKET_ALIGNMENT * (2**9 if args.ddp_pad_buckets_for_high_nccl_busbw else 1)) if pads else 1
    sizes = np.array([weight.elements for weight in weights], dtype=np.int64)
    ends = np.cumsum(_round_up(sizes, ALIGNMENT) if pads else sizes)
    ends += sizes - np.diff(ends, prepend=0)  # where each weight would end, were all of them in one bucket
    alone = {index for index, weight in enumerate(weights) if pads and weight.is_shared}
    borders = sorted({0, len(weights), *alone, *(index + 1 for index in alone)})
    last, buckets, begin = np.empty_like(ends), [], 0
    for start, stop in itertools.pairwise(borders):
        while start < stop:
            last[start:stop] = ends[start:stop] + (begin - (ends[start] - sizes[start]))
            if limit is not None:
                start += int(np.searchsorted(last[start:stop], begin + limit)) + 1
            start = stop if limit is None else min(start, stop)
            buckets.append((begin, _round_up(int(last[start - 1]), unit)))
            begin = buckets[-1][1]
    return last - sizes, last, np.array(buckets, dtype=np.int64)


def gradient_itemsize(args, itemsize: int) -> int:
    """Bytes of a gradient, by those of its weight."""
    return 4 if args.accumulate_allreduce_grads_in_fp32 else itemsize


def gradient_bytes(buffer: GradientBuffer, args) -> int:
    """Bytes of a gradient buffer, with padding."""
    return buffer.elements * gradient_itemsize(args, buffer.itemsize)
