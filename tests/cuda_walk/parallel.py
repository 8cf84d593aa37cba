"""Walks rollouts and updates of one of two ranks that share a model: by tensors with their sequences, or by experts."""

import functools

from tests.cuda_walk import rollout, training
from tests.cuda_walk.device import Walk

TENSORS = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --expert-model-parallel-size 2"


def _send_half():
    """Sends half of the rows to the other rank, and gets as many: the host reads their number, and nothing has one."""
    from megarl.mcore.moe import layer

    real = layer.tensor_parallel.all_to_all

    def exchange(group, rows, *_):
        halves = [len(rows) // 2, len(rows) - len(rows) // 2]
        return real(group, rows, halves, halves)

    layer.tensor_parallel.all_to_all = exchange


def _agree():
    """Makes the other rank want what this one does, after the collective that would tell."""
    from megarl.mcore.inference.session import GenerationSession

    real = GenerationSession.highest_of_replicas

    def agree(session, level: int) -> int:
        real(session, level)
        return level

    GenerationSession.highest_of_replicas = agree


def _generate(flags: str, walk: Walk, **settings) -> list:
    _send_half()
    _agree()
    return rollout.generate(walk, flags, **settings)


def _update(flags: str, walk: Walk) -> dict:
    _send_half()
    return training.update(walk, f"--bf16 {flags}")


SCENARIOS = {  # name -> (what walks, ranks)
    "tensor parallel": (functools.partial(_generate, TENSORS), 2),
    "graphs, tensor parallel": (functools.partial(_generate, TENSORS, **rollout.GRAPHS), 2),
    "expert parallel": (functools.partial(_generate, EXPERTS, routes=True, has_graphs=False), 2),
    "update tensor parallel": (functools.partial(_update, TENSORS), 2),
    "update expert parallel": (functools.partial(_update, EXPERTS), 2),
}
