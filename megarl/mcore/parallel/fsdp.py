"""FSDP (`--use-torch-fsdp2`): each data-parallel rank holds its rows of every parameter.

PyTorch's `fully_shard` gathers a transformer layer during its forward or backward; embeddings and head stay gathered
during those of the whole model. Megatron's wrapper hard-codes "cuda", averages gradients and cannot tie embeddings.
This one replaces Megatron's DistributedDataParallel, sums gradients, and runs on every device. `fully_shard` cannot
mix types in a layer: fp32 vectors of a layer of 16 bits (decays of recurrent states) stay whole on every rank, as do
parameters that several layers share.
"""

import contextlib
from collections import Counter
from dataclasses import replace

import megatron.core.dist_checkpointing.optimizer as checkpoint_optimizer
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer import clip_grads
from packaging.version import Version
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megarl.mcore import device

# Megatron looks up a parameter's optimizer state by the identity of its local tensor, but torch creates a new one at
# every call. Without the conversion, entries describe whole parameters and moments; `local_rows` slices them.
checkpoint_optimizer.to_local_if_dtensor = lambda tensor: tensor
# For the norm of all gradients Megatron looks up the ranks of sharded ones, and forgets them at one that is whole.
_group_of = clip_grads.get_data_parallel_group_if_dtensor
clip_grads.get_data_parallel_group_if_dtensor = lambda tensor, found=None: _group_of(tensor, found) or found


class FullyShardedDataParallel(_BaseDataParallel):
    """A model chunk with parameters, gradients and optimizer states sharded over data- and context-parallel ranks. Each
    backward reduce-scatters gradients, so all ranks must run the same number of micro-batches."""

    def __init__(self, config, ddp_config, module, pg_collection):
        """Takes the arguments of DistributedDataParallel; `module` has equal weights on every rank of the group."""
        super().__init__(config=config, module=module)
        self.ddp_config, self._group = ddp_config, pg_collection.dp_cp
        shard(module, pg_collection, ddp_config.grad_reduce_in_fp32)
        for parameter in self._whole_parameters():
            parameter.shared = dist.get_rank(self._group) > 0  # counted once in gradient norms

    def zero_grad_buffer(self):
        """Drops the references to the last update's gradients; `zero_grad` of the optimizer frees them."""
        for parameter in self.module.parameters():
            parameter.main_grad = None

    def finish_grad_sync(self, force_all_reduce: bool = False):
        """Sets `main_grad`, which Megatron's optimizers read; backward has reduced gradients of sharded parameters."""
        grads = [parameter.grad for parameter in self._whole_parameters()]
        if grads:
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=self._group)
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))
        for parameter in self.module.parameters():
            parameter.main_grad = parameter.grad

    def _whole_parameters(self) -> list[torch.nn.Parameter]:
        """The trained parameters that each rank has whole."""
        return [p for p in self.module.parameters() if p.requires_grad and not isinstance(p, DTensor)]


def shard(chunk, pg_collection, reduce_in_fp32: bool = False):
    """Shards a chunk's parameters by rows over `pg_collection.dp_cp`, in place. Forward passes gather what they need
    and free it again, with and without gradients. Parameters of another type than the chunk's, and those of
    several layers, stay whole."""
    mesh = DeviceMesh.from_group(pg_collection.dp_cp, device.device().type)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if reduce_in_fp32 else None, cast_forward_inputs=False)
    attributes = {name: dict(vars(parameter)) for name, parameter in chunk.named_parameters()}
    whole_ones = {parameter for parameter in chunk.parameters() if parameter.dtype != chunk.config.params_dtype}
    for parameter in chunk.parameters() if reduce_in_fp32 else ():
        parameter.grad_dtype = torch.float32  # else micro-batches would accumulate in the parameter's precision
    uses = Counter(parameter for layer in chunk.decoder.layers for parameter in layer.parameters())
    whole_ones |= {parameter for parameter, count in uses.items() if count > 1}
    for module in (*chunk.decoder.layers, chunk):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=whole_ones or None)
        if reduce_in_fp32:
            _keep_fp32_gradients(module)
        module.set_gradient_divide_factor(1.0)  # losses are local sums over global counts, so gradients are summed
        module.set_force_sum_reduction_for_comms(True)
    for name, parameter in chunk.named_parameters():
        vars(parameter).update(attributes[name])  # Megatron's tensor- and sequence-parallel marks


def _keep_fp32_gradients(module: FSDPModule):
    """`fully_shard` of torch 2.14 takes no notice of `grad_dtype`: it casts reduced gradients to the precision of their
    parameters. This makes it leave them as they are."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None or Version(torch.__version__) >= Version("2.15.dev"):
        return
    init_dtypes = group._init_mp_dtypes

    def init_and_keep():
        init_dtypes()
        group._orig_dtype = torch.float32

    group._init_mp_dtypes = init_and_keep
    for parameter in group.fsdp_params:
        parameter.sharded_param.grad_dtype = torch.float32


def rows_here(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a parameter, a view, outside of forward and backward passes; all of them without FSDP."""
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()


def range_here(parameter: torch.Tensor) -> range:
    """Which rows these are."""
    if not isinstance(parameter, DTensor):
        return range(len(parameter))
    shape, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return range(start[0], start[0] + shape[0])


def with_rows(parameter: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A tensor that is sharded like a parameter and has these rows on this rank; without FSDP the rows themselves."""
    if not isinstance(parameter, DTensor):
        return rows
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(rows, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """All rows of a parameter; a collective of the ranks that shard it."""
    return parameter.detach().full_tensor() if isinstance(parameter, DTensor) else parameter.detach()


@contextlib.contextmanager
def gathered_outside_layers(chunk):
    """Context in which the parameters of a chunk outside of its transformer layers are whole, to be read."""
    if isinstance(chunk, FSDPModule):
        chunk.unshard()
    try:
        yield
    finally:
        if isinstance(chunk, FSDPModule):
            chunk.reshard()


def local_rows(state: dict) -> dict:
    """Replaces checkpoint entries of whole FSDP parameters and moments by this rank's rows, in place. Keys and global
    shapes stay those of an unsharded model, so each layout loads the checkpoints of any other. Loaded values are
    sharded like the parameters. Entries of plain tensors stay unchanged."""

    def rows(entry):
        is_sharded = isinstance(entry, ShardedBase) and isinstance(entry.data, DTensor)
        return _rows(entry) if is_sharded else entry

    dict_list_map_inplace(rows, state)
    return state


def _rows(entry: ShardedTensor | ShardedTensorFactory) -> ShardedTensorFactory:
    whole = entry.data.detach()
    here = range_here(whole)

    def build(key: str, data: DTensor, *_) -> list[ShardedTensor]:
        local = data.to_local()
        meta = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
        if isinstance(entry, ShardedTensor):
            tensors = [replace(entry, key=key, data=meta)]
        else:
            tensors = entry.build_fn(key, meta, entry.replica_id, entry.flattened_range)
        shards, start = [], 0
        for tensor in tensors:
            shards += _overlap(tensor, start, local, here.start)
            start += tensor.local_shape[0]
        return shards or [_placeholder(tensors[0], local)]

    def merge(shards: list[torch.Tensor]) -> torch.Tensor:
        rows = [data.reshape(-1, *whole.shape[1:]) for data in shards]
        return with_rows(whole, torch.cat(rows)[: len(here)])  # without a placeholder row

    return ShardedTensorFactory(entry.key, whole, build, merge, entry.replica_id)


def _overlap(tensor: ShardedTensor, start: int, local: torch.Tensor, first: int) -> list[ShardedTensor]:
    """Returns the rows of `tensor` (from row `start`) that `local` (from row `first`) holds: one entry or none."""
    begin, end = max(start, first), min(start + tensor.local_shape[0], first + len(local))
    if begin >= end:
        return []
    data, offset = local[begin - first : end - first], list(tensor.global_offset)
    offset[tensor.prepend_axis_num] += begin - start
    return [_with_rows(tensor, data, offset, (*tensor.replica_id[:-1], 0))]


def _placeholder(tensor: ShardedTensor, local: torch.Tensor) -> ShardedTensor:
    """Returns an unsaved replica of row 0 for a rank without rows: a checkpoint cannot hold empty shards."""
    return _with_rows(tensor, local.new_empty(1, *local.shape[1:]), tensor.global_offset, 1)


def _with_rows(tensor: ShardedTensor, data: torch.Tensor, offset, replica_id) -> ShardedTensor:
    # Shards of unequal height form no regular grid, and without one Megatron needs a tensor with all axes of the key.
    data = data.reshape((1,) * tensor.prepend_axis_num + tuple(data.shape))
    extent = {"local_shape": tuple(data.shape), "global_offset": tuple(offset), "prepend_axis_num": 0}
    return replace(tensor, data=data, replica_id=replica_id, axis_fragmentations=None, **extent)
