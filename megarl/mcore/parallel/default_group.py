"""Overrides the default process group that megatron-core still uses, for the duration of a call."""

import contextlib

import torch.distributed as dist


@contextlib.contextmanager
def override_default_group(group):
    """Makes `group` the default of object gathers, world size and rank inside: some Megatron calls take no group.

    `get_megatron_optimizer` gathers its parameter groups over the world, but ranks outside the role never call it.
    """
    gather, size, rank = dist.all_gather_object, dist.get_world_size, dist.get_rank
    dist.all_gather_object = lambda objects, item, group=group: gather(objects, item, group=group)  # type: ignore[assignment]
    dist.get_world_size = lambda group=group: size(group)
    dist.get_rank = lambda group=group: rank(group)
    try:
        yield
    finally:
        dist.all_gather_object, dist.get_world_size, dist.get_rank = gather, size, rank
