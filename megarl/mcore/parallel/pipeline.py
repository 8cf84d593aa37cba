"""Runs micro-batches through a model with Megatron's schedules: one stage, 1F1B, or interleaved virtual stages."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_schedule_table,
)
from torch.utils import _pytree as pytree

from megarl.mcore import device


class KnownShapeCommunicator(P2PCommunicator):
    """Megatron's, between stages that know how long every micro-batch is.

    Else each tensor is announced by its shape, for which the host would wait, with all that the device has to do.
    """

    def __init__(self, group, config, rows: list[int], chunks: int):
        """`rows`: of the hidden states of each micro-batch on a rank; `chunks`: of the model on a rank."""
        super().__init__(group, config)
        table = [(i, 0) for i in range(len(rows))]
        if chunks > 1:
            table = get_schedule_table(len(rows), chunks, config.microbatch_group_size_per_vp_stage)
        # The first chunk of all receives nothing in forward, the last of all nothing in backward, which begins with it.
        shapes = [([rows[i], 1, config.hidden_size], bool(chunk)) for i, chunk in table]
        self._before = iter([shape for shape, comes in shapes if comes or not self.is_pp_first_stage])
        self._behind = iter([shape for shape, comes in shapes if comes or not self.is_pp_last_stage])

    def _communicate_shapes(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next):
        """(shape of what comes from the stage before, from the one behind)."""
        return next(self._before) if recv_prev else None, next(self._behind) if recv_next else None


def run_microbatches(
    stages, microbatches: list, forward: Callable, loss: Callable, pg_collection, train: bool,
    rows: list[int] | None = None,
) -> list:  # fmt: skip
    """Forward (and backward) of every micro-batch; gradients are accumulated and reduced behind the last one.

    Args:
        stages: the model's chunks on this rank, in their gradient-buffer wrappers when training.
        microbatches: the same number on every lane; a multiple of the pipeline size with virtual stages.
        forward: (chunk, micro-batch) -> output: hidden states from all but the model's last chunk.
        loss: (output, micro-batch) -> (scalar loss, result); the loss is a local sum over a global count, so that
            the gradient is the same for every split into micro-batches. Called on the last chunk alone.
        train: whether to run backward and reduce gradients.
        rows: of the hidden states of each micro-batch on this rank; None: pipeline stages ask each other.

    Returns:
        The results (tensors, or tuples of them), in the order of the micro-batches, on every rank of the lane.
    """
    no_tokens = torch.zeros([], dtype=torch.int)

    def forward_step(iterator: Iterable, chunk):
        microbatch = next(iterator)

        def loss_function(output):
            value, result = loss(output, microbatch)
            return value, no_tokens, result

        return forward(chunk, microbatch), loss_function

    chunks, schedule, pipeline = list(stages), forward_backward_no_pipelining, {}
    if dist.get_world_size(pg_collection.pp) > 1:
        schedule = forward_backward_pipelining_without_interleaving
        if len(chunks) > 1:
            schedule = forward_backward_pipelining_with_interleaving
        between = (pg_collection.pp, chunks[0].config)
        communicator = (
            P2PCommunicator(*between) if rows is None else KnownShapeCommunicator(*between, rows, len(chunks))
        )
        pipeline = {"p2p_communicator": communicator}
    several = len(chunks) > 1
    results = schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in chunks] if several else iter(microbatches),
        model=chunks if several else chunks[0],
        num_microbatches=len(microbatches),
        seq_length=0,
        micro_batch_size=1,
        forward_only=not train,
        pg_collection=pg_collection,
        **pipeline,
    )
    return from_last_stage(results, pg_collection.pp)


def from_last_stage(results: list, group) -> list:
    """What the last pipeline stage has, on every stage: one broadcast of a description, one of all tensors' bytes.

    Args:
        results: nested lists and tuples of tensors on the last stage; ignored elsewhere.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return results
    source = dist.get_global_rank(group, size - 1)
    is_last = dist.get_rank() == source
    leaves, tree = pytree.tree_flatten(results) if is_last else ([], None)
    message = [([(leaf.shape, leaf.dtype) for leaf in leaves], tree)]
    dist.broadcast_object_list(message, source, group=group)
    forms, tree = message[0]
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in forms]
    parts = [leaf.detach().contiguous().reshape(-1).view(torch.uint8) for leaf in leaves]
    buffer = torch.cat(parts) if parts else torch.empty(sum(sizes), dtype=torch.uint8, device=device.device())
    if sum(sizes):
        dist.broadcast(buffer, source, group=group)
    if is_last:
        return results
    # A copy each: a view of another dtype needs an aligned start.
    tensors = [
        part.clone().view(dtype).reshape(shape) for part, (shape, dtype) in zip(buffer.split(sizes), forms, strict=True)
    ]
    return pytree.tree_unflatten(tensors, tree)
