"""Fake distributed worlds: process groups without other processes, through torch's fake backend.

Inside `fake_world(4096)` this process is one rank of 4,096. It creates its groups with the same code as a real run;
collectives send nothing.
"""

import contextlib

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0):
    """Makes this process `rank` of a fake world of `size` ranks. RuntimeError if torch.distributed is initialized."""
    if dist.is_initialized():
        raise RuntimeError("torch.distributed is initialized already: start a fake world only in a process without one")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
