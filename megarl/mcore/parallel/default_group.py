"""Process-wide state that megatron-core still insists on, set to a role's own for the duration of a call."""

import contextlib

import torch.distributed as dist


@contextlib.contextmanager
def override_default_group(group):
    """Inside, the default group of object gathers and sizes is `group`: some of Megatron's calls know no other.

    `get_megatron_optimizer` gathers its parameter groups from "the world", whose other ranks never join the call of
    a role that they do not belong to.
    """
    gather, size, rank = dist.all_gather_object, dist.get_world_size, dist.get_rank
    dist.all_gather_object = lambda found, item, group=group: gather(found, item, group=group)
    dist.get_world_size = lambda group=group: size(group)
    dist.get_rank = lambda group=group: rank(group)
    try:
        yield
    finally:
        dist.all_gather_object, dist.get_world_size, dist.get_rank = gather, size, rank
