#!/usr/bin/env bash
# torch 2.14.1, gloo, two ranks: a MAX or MIN over ranks keeps a NaN of rank 0 and loses one of rank 1.
# SUM has NaN in both cases. So a metric that is a maximum over ranks looks healthy while one rank has NaN.
# Output: NaN on rank 0: max nan, min nan, sum nan; NaN on rank 1: max 1.0, min 1.0, sum nan
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1
cat >both.py <<'PYTHON'
import math
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank(number, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    found = {}
    for holder in (0, 1):
        for name in ("MAX", "MIN", "SUM"):
            value = torch.tensor([math.nan if number == holder else 1.0])
            dist.all_reduce(value, getattr(dist.ReduceOp, name))
            found[holder, name] = value.item()
    if number == 0:
        for holder in (0, 1):
            said = ", ".join(f"{name.lower()} {found[holder, name]}" for name in ("MAX", "MIN", "SUM"))
            print(f"NaN on rank {holder}: {said}")
    assert all(math.isnan(found[0, name]) for name in ("MAX", "MIN", "SUM"))
    assert (found[1, "MAX"], found[1, "MIN"]) == (1.0, 1.0) and math.isnan(found[1, "SUM"])
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1],), 2)
PYTHON
"$PYTHON" both.py "$FOLDER/store"
