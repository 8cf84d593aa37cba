"""Runs micro-batches through a model with Megatron's schedules, forward only or with backward."""

from collections.abc import Callable, Iterable

import torch
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining


def run_microbatches(model, microbatches: list, forward: Callable, loss: Callable, collection, train: bool) -> list:
    """Forward (and backward) of every micro-batch; gradients are accumulated and reduced behind the last one.

    Args:
        model: the DDP wrapper when training, the bare model otherwise.
        forward: (model, micro-batch) -> output.
        loss: (output, micro-batch) -> (scalar loss, result); the loss is a local sum over a global count, so that
            the gradient is the same for every split into micro-batches.
        train: whether to run backward and reduce gradients.

    Returns:
        The results, in the order of the micro-batches.
    """
    no_tokens = torch.zeros([], dtype=torch.int)

    def forward_step(iterator: Iterable, model):
        microbatch = next(iterator)

        def loss_function(output):
            value, result = loss(output, microbatch)
            return value, no_tokens, result

        return forward(model, microbatch), loss_function

    return forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=iter(microbatches),
        model=model,
        num_microbatches=len(microbatches),
        seq_length=0,
        micro_batch_size=1,
        forward_only=not train,
        pg_collection=collection,
    )
