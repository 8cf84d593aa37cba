"""Walks what moves between memories and ranks on a device without hardware: offload, and batches between roles."""

import torch
import torch.distributed as dist

from tests.cuda_walk.device import CUDA, Walk
from tests.cuda_walk.training import device_batch, host_batch
from tests.helpers.models.tiny_models import SAFETY, VOCAB, join_actor, parse_roles


def offload(walk: Walk) -> dict:
    """What is counted while a trained model leaves and comes back, by kind of its memory; and sizes of its storages."""
    from megarl.mcore.model import gpt
    from megarl.mcore.offload import KVCacheInGradBuffer, offload_trainable
    from megarl.mcore.training import optimizer

    args, place = join_actor("--bf16 --use-distributed-optimizer")
    stages = gpt.build_model(args, VOCAB, place.pg_collection)
    wrapped = optimizer.wrap_for_training(stages, args, place.pg_collection)
    adam = optimizer.build_optimizer(wrapped, args, place.pg_collection)
    moved = offload_trainable(stages, wrapped, adam)
    cache = KVCacheInGradBuffer(wrapped, moved)
    cache.memory(2**20)
    walk.clear()
    with moved.present("weights", "gradients", "optimizer", changed=True):
        is_there = all(block.storage.nbytes() for blocks in moved.blocks.values() for block in blocks)
    left = sum(block.storage.nbytes() for blocks in moved.blocks.values() for block in blocks)
    return {"moves": walk.counts() | {"is_there": is_there, "left": left}}


def exchange(walk: Walk) -> dict:
    """What is counted while the actor sends a batch to a critic on another rank, and gets one from there."""
    from megarl.comm import exchange, role_mesh

    roles = parse_roles("--role-map actor=0;critic=1;reward=1;reference=1", dist.get_world_size(), program="rl")
    mesh = role_mesh.create_mesh(roles, SAFETY)
    batch = device_batch(host_batch()[0])
    assignment = {role: torch.zeros(len(batch), dtype=torch.int64) for role in ("actor", "critic")}
    found, names = {}, ["tokens", "response_mask", "advantages"]
    pending = exchange.PendingSends()
    walk.clear()
    assert exchange.send(mesh, batch, "actor", "critic", names, assignment, pending) is None
    pending.wait()
    found["send"] = walk.counts()
    walk.clear()
    arrived = exchange.send(mesh, None, "critic", "actor", ["values"], assignment)
    assert all(getattr(arrived, name).device == CUDA for name in arrived.present())
    found["receive"] = walk.counts()
    return found


SCENARIOS = {"offload": (offload, 1), "exchange": (exchange, 2)}  # name -> (what walks, ranks)
