"""Megatron-core's layout of gradient buffers: padding, buckets, and each rank's share of them."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.mcore.model.weight_table import Weight

ALIGNMENT, BUCKET_ALIGNMENT = 64, 128  # elements; the distributed optimizer's padding
MIN_BUCKET, BUCKET_PER_REPLICA = 40_000_000, 1_000_000  # elements of a bucket with --overlap-grad-reduce


class GradientBuffer(NamedTuple):
    """The contiguous gradients of one dtype and reducing group: [start, end) of each weight and bucket, in elements."""

    ranges: list[tuple[int, int]]
    buckets: list[tuple[int, int]]
    itemsize: int
    ranks: int  # data-parallel ranks that reduce it

    @property
    def elements(self) -> int:
        """Elements, with padding."""
        return self.buckets[-1][1]

    def shares(self) -> np.ndarray:
        """[ranks] elements of each rank's shares of all buckets, without padding."""
        return sum((shares.sum(1) for shares in self._shares_of_buckets()), np.zeros(self.ranks, dtype=np.int64))

    def shares_of_weights(self) -> np.ndarray:
        """[ranks, weights] elements of each rank's share of each weight."""
        return np.concatenate(list(self._shares_of_buckets()), axis=1)

    def _shares_of_buckets(self) -> Iterator[np.ndarray]:
        first, last = np.array(self.ranges, dtype=np.int64).T
        for start, end in self.buckets:
            edges = np.linspace(start, end, self.ranks + 1, dtype=np.int64)[:, None]
            own = slice(*np.searchsorted(first, (start, end)))  # a weight is in one bucket
            yield (np.minimum(last[own], edges[1:]) - np.maximum(first[own], edges[:-1])).clip(0)


def _round_up(value: int, multiple: int) -> int:
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
        ranges, buckets = _lay_out(members[::-1], limit, ranks, args)
        laid_out.append(GradientBuffer(ranges, buckets, itemsize, ranks))
    return laid_out


def _lay_out(weights: list[Weight], limit: int | None, ranks: int, args):
    """(ranges, buckets) of a gradient buffer; a bucket is closed at `limit` elements, a tied embedding has its own."""
    pads = args.use_distributed_optimizer
    unit = np.lcm(ranks, BUCKET_ALIGNMENT * (2**9 if args.ddp_pad_buckets_for_high_nccl_busbw else 1)) if pads else 1
    ranges, buckets, begin, position = [], [], 0, 0
    for weight in weights:
        position = _round_up(position, ALIGNMENT) if pads else position
        alone = pads and weight.is_shared
        if alone and position > begin:
            begin = position = _round_up(position, unit)
            buckets.append((buckets[-1][1] if buckets else 0, begin))
        ranges.append((position, position + weight.elements))
        position += weight.elements
        if alone or limit is not None and position - begin >= limit:
            position = _round_up(position, unit)
            buckets.append((begin, position))
            begin = position
    if not buckets or position > buckets[-1][1]:
        buckets.append((begin, _round_up(position, unit)))
    return ranges, [(int(a), int(b)) for a, b in buckets]


def gradient_itemsize(args, itemsize: int) -> int:
    """Bytes of a gradient, by those of its weight."""
    return 4 if args.accumulate_allreduce_grads_in_fp32 else itemsize


def gradient_bytes(buffer: GradientBuffer, args) -> int:
    """Bytes of a gradient buffer, with padding."""
    return buffer.elements * gradient_itemsize(args, buffer.itemsize)
