#!/usr/bin/env bash
# torch 2.14.1, gloo, two ranks: the gradient of a sharded tensor's (DTensor's) largest number depends on which rank has
# it. vector_norm(inf): right if the first rank has it, else infinite there and NaN in all others. amax: two equal
# largest numbers share the gradient within a rank alone, so on two ranks each has all of it. The values are right.
# Output: norm, first rank has it: 4.0, [1.0, 0.0, 0.0, 0.0]; second rank: 4.0, [nan, nan, nan, inf]
# amax of 1 5 5 2: 5.0, [0.0, 1.0, 1.0, 0.0]; on one rank [0.0, 0.5, 0.5, 0.0]
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1
cat >largest.py <<'PYTHON'
import math
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def gradient(function, numbers, mesh=None):
    """The function's value, and its gradient; mesh: of a tensor whose numbers lie on its ranks."""
    x = torch.tensor(numbers)
    x = (x if mesh is None else distribute_tensor(x, mesh, [Shard(0)])).requires_grad_()
    value = function(x)
    value.backward()
    value, found = (value, x.grad) if mesh is None else (value.full_tensor(), x.grad.full_tensor())
    return value.item(), found.tolist()


def norm(x):
    return torch.linalg.vector_norm(x, math.inf)


def rank(number, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    first, second = (gradient(norm, numbers, mesh) for numbers in ([4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 3.0, 4.0]))
    ties, alone = (gradient(torch.amax, [1.0, 5.0, 5.0, 2.0], each) for each in (mesh, None))
    if number == 0:
        print(f"norm, first rank has it: {first[0]}, {first[1]}; second rank: {second[0]}, {second[1]}")
        print(f"amax of 1 5 5 2: {ties[0]}, {ties[1]}; on one rank {alone[1]}")
    assert gradient(norm, [1.0, 2.0, 3.0, 4.0]) == (4.0, [0.0, 0.0, 0.0, 1.0])
    assert first == (4.0, [1.0, 0.0, 0.0, 0.0])
    assert second[0] == 4.0 and all(map(math.isnan, second[1][:3])) and second[1][3] == math.inf
    assert ties == (5.0, [0.0, 1.0, 1.0, 0.0]) and alone == (5.0, [0.0, 0.5, 0.5, 0.0])
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1],), 2)
PYTHON
"$PYTHON" -W ignore largest.py "$FOLDER/store"
