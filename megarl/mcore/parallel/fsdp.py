"""Fully sharded parameters (`--use-torch-fsdp2`): each data-parallel rank keeps its rows of every parameter.

PyTorch's `fully_shard` gathers a transformer layer for the time of its forward or backward, embeddings and head for the
time of the whole model's. Megatron's wrapper of it writes "cuda", averages gradients and cannot tie embeddings; this
one stands where Megatron's DistributedDataParallel stands, sums, and runs on every device.
"""

from dataclasses import replace

import megatron.core.dist_checkpointing.optimizer as checkpoint_optimizer
import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megarl.mcore import device

# Megatron finds a parameter's optimizer state by the identity of its local tensor, of which torch makes a new one at
# every call. Left as they are, parameters and moments are described whole; `own_rows` cuts both.
checkpoint_optimizer.to_local_if_dtensor = lambda tensor: tensor


class FullyShardedDataParallel(_BaseDataParallel):
    """A model chunk whose parameters, gradients and optimizer states are split over data- and context-parallel ranks.

    Gradients are summed into the shards behind every backward, so all ranks of the group must run the same number of
    micro-batches.
    """

    def __init__(self, config, ddp_config, module, pg_collection):
        """Takes what DistributedDataParallel takes; `module` holds the same weights on every rank of the group."""
        super().__init__(config=config, module=module)
        self.ddp_config = ddp_config
        shard(module, pg_collection, ddp_config.grad_reduce_in_fp32)

    def zero_grad_buffer(self):
        """Forgets the gradients of the last update; `zero_grad` of the optimizer frees them."""
        for parameter in self.module.parameters():
            parameter.main_grad = None

    def finish_grad_sync(self, force_all_reduce: bool = False):
        """Backward has reduced every gradient: they go where Megatron's optimizers look for reduced ones."""
        for parameter in self.module.parameters():
            parameter.main_grad = parameter.grad


def shard(chunk, pg_collection, reduce_in_fp32: bool = False):
    """Splits a chunk's parameters by rows over `pg_collection.dp_cp`, in place; for training, or for scoring alone.

    Forwards gather what they need and free it again, with gradients and without.
    """
    mesh = DeviceMesh.from_group(pg_collection.dp_cp, device.device().type)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if reduce_in_fp32 else None, cast_forward_inputs=False)
    marks = {name: dict(vars(parameter)) for name, parameter in chunk.named_parameters()}
    for parameter in chunk.parameters() if reduce_in_fp32 else ():
        parameter.grad_dtype = torch.float32  # else micro-batches would be added up in the parameter's precision
    for module in (*chunk.decoder.layers, chunk):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        module.set_gradient_divide_factor(1.0)  # losses are local sums over global counts, so gradients are summed
        module.set_force_sum_reduction_for_comms(True)
    for name, parameter in chunk.named_parameters():
        vars(parameter).update(marks[name])  # Megatron's: tensor-parallel, sequence-parallel


def local_rows(state: dict) -> dict:
    """Replaces what Megatron says of whole sharded parameters and moments by this rank's rows of them, in place.

    Keys and global shapes remain those of a model that is not sharded: each layout loads what any other has saved.
    Loaded values are sharded like the parameters. Entries of plain tensors stay as they are.
    """

    def rows(entry):
        is_sharded = isinstance(entry, ShardedBase) and isinstance(entry.data, DTensor)
        return _rows(entry) if is_sharded else entry

    dict_list_map_inplace(rows, state)
    return state


def _rows(entry: ShardedTensor | ShardedTensorFactory) -> ShardedTensorFactory:
    whole = entry.data.detach()
    (height, *_), (first, *_) = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)

    def build(key: str, data: DTensor, *_) -> list[ShardedTensor]:
        local = data.to_local()
        stand_in = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
        pieces = [replace(entry, key=key, data=stand_in)] if isinstance(entry, ShardedTensor) else None
        pieces = pieces or entry.build_fn(key, stand_in, entry.replica_id, entry.flattened_range)
        found, start = [], 0
        for piece in pieces:
            found += _cut(piece, start, local, first)
            start += piece.local_shape[0]
        return found or [_spare(pieces[0], local)]

    def merge(parts: list[torch.Tensor]) -> DTensor:
        rows = [part.reshape(-1, *whole.shape[1:]) for part in parts]
        local = torch.cat(rows)[:height]  # nothing of a spare row
        layout = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(local, whole.device_mesh, whole.placements, run_check=False, **layout)

    return ShardedTensorFactory(entry.key, whole, build, merge, entry.replica_id)


def _cut(piece: ShardedTensor, start: int, local: torch.Tensor, first: int) -> list[ShardedTensor]:
    """What `local` (rows from `first` on) holds of a piece (rows from `start` on): one entry or none."""
    begin, end = max(start, first), min(start + piece.local_shape[0], first + len(local))
    if begin >= end:
        return []
    data, offset = local[begin - first : end - first], list(piece.global_offset)
    offset[piece.prepend_axis_num] += begin - start
    return [_part(piece, data, offset, (*piece.replica_id[:-1], 0))]


def _spare(piece: ShardedTensor, local: torch.Tensor) -> ShardedTensor:
    """For a rank without rows: a replica of the first row, never saved, since a checkpoint knows no empty shares."""
    return _part(piece, local.new_empty(1, *local.shape[1:]), piece.global_offset, 1)


def _part(piece: ShardedTensor, data: torch.Tensor, offset, replica_id) -> ShardedTensor:
    # Shares of unequal height form no regular grid, and without one Megatron wants a tensor of all axes of the key.
    data = data.reshape((1,) * piece.prepend_axis_num + tuple(data.shape))
    place = {"local_shape": tuple(data.shape), "global_offset": tuple(offset), "prepend_axis_num": 0}
    return replace(piece, data=data, replica_id=replica_id, axis_fragmentations=None, **place)
