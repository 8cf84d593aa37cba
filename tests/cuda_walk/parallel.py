"""Walks rollouts and updates of one of two ranks that share a model: by tensors with their sequences, or by experts."""

import functools

import torch.distributed as dist

from tests.cuda_walk import rollout, training
from tests.cuda_walk.device import Walk

TENSORS = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --expert-model-parallel-size 2"


def send_evenly():
    """Sends each rank as many rows, and gets as many: the host reads their number, and nothing has one."""
    from megarl.mcore.moe import layer

    real = layer.tensor_parallel.all_to_all

    def exchange(group, rows, *_):
        ranks = dist.get_world_size(group)
        shares = [(len(rows) + rank) // ranks for rank in range(ranks)]
        return real(group, rows, shares, shares)

    layer.tensor_parallel.all_to_all = exchange


def agree():
    """Makes the other rank want what this one does, after the collective that would tell."""
    from megarl.mcore.inference.generation_session import GenerationSession

    real = GenerationSession.highest_of_replicas

    def agree(session, level: int) -> int:
        real(session, level)
        return level

    GenerationSession.highest_of_replicas = agree


def _generate(flags: str, walk: Walk, **settings) -> list:
    send_evenly()
    agree()
    return rollout.generate(walk, flags, **settings)


def _update(flags: str, walk: Walk) -> dict:
    send_evenly()
    return training.update(walk, f"--bf16 {flags}")


SCENARIOS = {  # name -> (what walks, ranks)
    "tensor parallel": (functools.partial(_generate, TENSORS), 2),
    "graphs, tensor parallel": (functools.partial(_generate, TENSORS, **rollout.GRAPHS), 2),
    "expert parallel": (functools.partial(_generate, EXPERTS, routes=True), 2),
    "graphs, expert parallel": (functools.partial(_generate, EXPERTS, routes=True, **rollout.GRAPHS), 2),
    "update tensor parallel": (functools.partial(_update, TENSORS), 2),
    "update expert parallel": (functools.partial(_update, EXPERTS), 2),
}
