"""Trainable models on tiny shapes, with offload and without."""

import dataclasses

import torch.distributed as dist

from tests.helpers.models.tiny_models import VOCAB, join_actor, parse_roles

DISTRIBUTED, TP2 = "--use-distributed-optimizer", "--tensor-model-parallel-size 2"
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"


def critic_model(flags: str, offload: bool):
    """A critic's `TrainableModel` on this rank."""
    from megarl.roles.trainable_model import TrainableModel

    role = parse_roles(flags, dist.get_world_size())["actor"]
    role = dataclasses.replace(role, name="critic", offload=offload)
    return TrainableModel(role, join_actor(flags)[1], VOCAB, 1, value_head=True)


def loss_of_values(values, part):
    """A loss of a critic's values, and what is reported of it."""
    value = (values * part.advantages).sum() / 10
    return value, value.detach()
