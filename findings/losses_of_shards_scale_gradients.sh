#!/usr/bin/env bash
# torch 2.14.1, gloo, two ranks: a mean loss of sharded tensors (DTensor) is right, its gradient too large by the ranks.
# mse_loss, smooth_l1_loss, huber_loss, soft_margin_loss and binary_cross_entropy do so; l1_loss and the same mean
# written as ((x - y) ** 2).mean() do not. With rows that the ranks do not share evenly the loss is wrong, too: it is
# the mean of the ranks' means.
# Output: sharded against whole, 8 rows: mse_loss gradient 2.000, loss 1.000; 7 rows: gradient 1.750, loss 0.996;
# l1_loss and the written mean: 1.000 and 1.000 in both
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1
cat >losses.py <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

LOSSES = {
    "mse_loss": F.mse_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "l1_loss": F.l1_loss,
    "written mean": lambda x, y: ((x - y) ** 2).mean(),
}
SCALED = set(LOSSES) - {"l1_loss", "written mean"}


def ratios(loss, rows, mesh):
    """What the first row's gradient, and the loss, are by a sharded tensor, as multiples of those by a whole one."""
    x, y = torch.arange(rows * 4.0).sin().view(rows, 4), torch.arange(rows * 4.0).cos().view(rows, 4)
    whole = x.clone().requires_grad_()
    expected = loss(whole, y)
    expected.backward()
    shards = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    found = loss(shards, distribute_tensor(y, mesh, [Shard(0)]))
    found.backward()
    gradient = shards.grad.full_tensor()[0] / whole.grad[0]
    assert gradient.max() - gradient.min() < 1e-4
    return gradient.mean().item(), (found.full_tensor() / expected).item()


def rank(number, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for rows in (8, 7):
        for name, loss in LOSSES.items():
            gradient, value = ratios(loss, rows, mesh)
            if number == 0:
                print(f"{name} {rows} rows: gradient {gradient:.3f}, loss {value:.3f}")
            expected = rows / -(-rows // 2) if name in SCALED else 1.0
            assert abs(gradient - expected) < 1e-3
            assert (abs(value - 1) < 1e-5) == (rows == 8 or name not in SCALED)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, (sys.argv[1],), 2)
PYTHON
"$PYTHON" -W ignore losses.py "$FOLDER/store"
