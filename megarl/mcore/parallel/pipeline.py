"""Runs micro-batches with Megatron's pipeline schedules: one stage, 1F1B, or interleaved virtual stages."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func, get_schedule_table
from torch.utils import _pytree as pytree

from megarl.mcore import device
from megarl.observe import activity


class KnownShapeCommunicator(P2PCommunicator):
    """Megatron's communicator for stages that know the length of every micro-batch. Otherwise stages exchange each
    tensor's shape first, and the host would wait for all queued device work."""

    def __init__(self, group, config, rows: list[int], chunks: int):
        """`rows`: hidden-state rows of each micro-batch on a rank; `chunks`: number of model chunks on a rank."""
        super().__init__(group, config)
        table = [(i, 0) for i in range(len(rows))]
        if chunks > 1:
            table = get_schedule_table(len(rows), chunks, config.microbatch_group_size_per_vp_stage)
        # The model's first chunk receives nothing in forward; its last chunk receives nothing in backward.
        shapes = [([rows[i], 1, config.hidden_size], bool(chunk)) for i, chunk in table]
        self._from_previous = iter([shape for shape, received in shapes if received or not self.is_pp_first_stage])
        self._from_next = iter([shape for shape, received in shapes if received or not self.is_pp_last_stage])

    def _communicate_shapes(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next):
        """Returns the shapes to receive from the previous and from the next stage, None for no tensor."""
        return next(self._from_previous) if recv_prev else None, next(self._from_next) if recv_next else None


def run_microbatches(
    stages,
    microbatches: list,
    forward: Callable,
    loss: Callable,
    pg_collection,
    train: bool,
    rows: list[int] | None = None,
) -> list:
    """Runs forward (and backward) of every micro-batch; gradients accumulate and are reduced after the last one.

    Args:
        stages: the model's chunks on this rank, in their gradient-buffer wrappers for training.
        microbatches: the same number on every replica; a multiple of the pipeline size with virtual stages.
        forward: (chunk, micro-batch) -> output; hidden states except from the model's last chunk.
        loss: (output, micro-batch) -> (scalar loss, result), called for the last chunk only. The loss is a local sum
            over a global count, so that the split into micro-batches does not change the gradient.
        train: whether to run backward and reduce gradients.
        rows: hidden-state rows of each micro-batch on this rank; None: pipeline stages exchange shapes.

    Returns:
        The results (tensors, or tuples of tensors), in micro-batch order, on every rank of the replica.
    """
    no_tokens = torch.zeros([], dtype=torch.int)

    def forward_step(iterator: Iterator, chunk):
        microbatch = next(iterator)
        activity.tick()

        def loss_function(output):
            value, result = loss(output, microbatch)
            return value, no_tokens, result

        return forward(chunk, microbatch), loss_function

    chunks, options, pp_size = list(stages), {}, dist.get_world_size(pg_collection.pp)
    is_virtual = len(chunks) > 1
    if pp_size > 1:
        group, config = pg_collection.pp, chunks[0].config
        options["p2p_communicator"] = (
            P2PCommunicator(group, config) if rows is None else KnownShapeCommunicator(group, config, rows, len(chunks))
        )
    schedule = get_forward_backward_func(pp_size, len(chunks) if is_virtual else None)
    results = schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in chunks] if is_virtual else iter(microbatches),
        model=chunks if is_virtual else chunks[0],
        num_microbatches=len(microbatches),
        seq_length=0,
        micro_batch_size=1,
        forward_only=not train,
        pg_collection=pg_collection,
        **options,
    )
    return from_last_stage(results, pg_collection.pp)


def from_last_stage(results: list, group) -> list:
    """Returns the last pipeline stage's results on every stage: broadcasts their structure, then all bytes at once.
    `results`: nested lists and tuples of tensors on the last stage; ignored on other stages."""
    size = dist.get_world_size(group)
    if size == 1:
        return results
    source = dist.get_global_rank(group, size - 1)
    is_last = dist.get_rank() == source
    leaves, tree = pytree.tree_flatten(results) if is_last else ([], None)
    structure = [([(leaf.shape, leaf.dtype) for leaf in leaves], tree)]
    dist.broadcast_object_list(structure, source, group=group)
    specs, tree = structure[0]
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in specs]
    flat = [leaf.detach().contiguous().reshape(-1).view(torch.uint8) for leaf in leaves]
    buffer = torch.cat(flat) if flat else torch.empty(sum(sizes), dtype=torch.uint8, device=device.device())
    if sum(sizes):
        dist.broadcast(buffer, source, group=group)
    if is_last:
        return results
    # Each tensor is a copy, because a view of another dtype needs an aligned start.
    tensors = [
        data.clone().view(dtype).reshape(shape) for data, (shape, dtype) in zip(buffer.split(sizes), specs, strict=True)
    ]
    return pytree.tree_unflatten(tensors, tree)
