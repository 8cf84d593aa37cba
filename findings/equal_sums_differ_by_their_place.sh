#!/usr/bin/env bash
# torch 2.14.1, gloo, three ranks: a SUM of the same three numbers depends on where they lie in the tensor.
# A tensor is cut into pieces, whose sums start at different ranks. So a gradient's bits change when a bucket's
# length changes or a neighbour joins it; with two ranks it does not.
# Output: 0.1 + 1e8 - 1e8 in 1 element: 0.1; in 12 elements: 0.0 0.1; of 300 random sums alone and together: above 10 differ
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1
cat >sums.py <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def summed(numbers):
    numbers = numbers.clone()
    dist.all_reduce(numbers)
    return numbers


def rank(number, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=3)
    mine = torch.tensor([0.1, 1e8, -1e8])[number]
    one, twelve = (summed(mine.repeat(size)).unique() for size in (1, 12))
    values = torch.randn(300, generator=torch.Generator().manual_seed(number))
    together, alone = summed(values), torch.cat([summed(value) for value in values.split(1)])
    differ = int((together != alone).sum())
    if number == 0:
        several = " ".join(f"{value:.1f}" for value in twelve)
        print(f"0.1 + 1e8 - 1e8 in 1 element: {one.item():.1f}; in 12 elements: {several}; ", end="")
        print(f"of 300 random sums alone and together: {differ} differ")
    assert len(one) == 1 and len(twelve) == 2 and differ > 10
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1],), 3)
PYTHON
"$PYTHON" sums.py "$FOLDER/store"
