"""What the plan says that a rank of a tiny model holds, and what it holds."""

import numpy as np
import torch.distributed as dist

from megarl.planning import memory, parameters
from tests.helpers.models import tiny_models
from tests.helpers.models.tiny_models import VOCAB

join_actor = tiny_models.join_actor.__wrapped__  # each fake world has its own groups


def build(flags: str, shape: str, value_head: bool):
    """(namespace, groups, stages, gradient buffers, optimizer) of the actor on this rank."""
    from megarl.mcore.model import gpt
    from megarl.mcore.training import optimizer

    args, place = join_actor(flags, shape)
    stages = gpt.build_model(args, VOCAB, place.pg_collection, value_head)
    wrapped = optimizer.wrap_for_training(stages, args, place.pg_collection)
    return args, place.pg_collection, stages, wrapped, optimizer.build_optimizer(wrapped, args, place.pg_collection)


def real_bytes(stages, wrapped, optimizer) -> tuple[int, int, int]:
    """(weights, gradients, optimizer states) of the tensors that this rank holds, padding included."""
    buffers = [b for w in wrapped for b in w.buffers + w.expert_parallel_buffers]
    weights = sum(sum(p.nbytes for p in b.params) if b.param_data is None else b.param_data.nbytes for b in buffers)
    own = {p.untyped_storage().data_ptr() for p in stages.parameters()}
    states = 0
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            states += sum(p.nbytes for p in group["params"] if p.untyped_storage().data_ptr() not in own)
        states += sum(t.nbytes for state in part.optimizer.state.values() for t in state.values())
    return weights, sum(b.grad_data.nbytes for b in buffers), states


def check_weights(args, pg_collection, stages, value_head: bool, rank: int, ranks: int):
    """The plan's weights are the model's, name by name; returns the bytes it says that this rank holds."""
    stage = dist.get_rank(pg_collection.pp)
    planned = parameters.stage_weights(args, VOCAB, value_head)[stage]
    for chunk, weights in zip(stages, planned, strict=True):
        real = [
            (n, tuple(p.shape), p.element_size(), not getattr(p, "allreduce", True), hasattr(p, "shared_embedding"))
            for n, p in chunk.named_parameters()
        ]
        assert [tuple(w[: len(real[0])]) for w in weights] == real
    trained = [parameters.trained_and_frozen(weights, args, None, value_head)[0] for weights in planned]
    parts = [memory.trained_bytes(weights, args, stage == 0) for weights in trained]
    states, each = np.sum([part[2] for part in parts], axis=0), ranks // dist.get_world_size(pg_collection.pp)
    return sum(p[0] for p in parts), sum(p[1] for p in parts), int(states[rank % each * len(states) // each])
