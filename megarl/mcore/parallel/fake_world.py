"""Ranks that do not exist: their process groups, by torch's fake backend.

Inside `world(4096)` this process is one rank of 4,096. The very code that a program runs creates its groups; what
would be sent goes nowhere.
"""

import contextlib

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0):
    """A world of `size` ranks, seen from one of them. RuntimeError where the process is in a world already."""
    if dist.is_initialized():
        raise RuntimeError("this process is a rank already: a world can be pretended only outside one")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
