#!/usr/bin/env bash
# megatron-core 0.19.2 (torch 2.14.1, CPU, gloo): with label smoothing, vocab_parallel_cross_entropy is another loss on each
# of two ranks that split a vocabulary, and another than on one.
# Without smoothing each rank has the loss of the whole vocabulary. The smoothing's mean over words, and the number of
# words that its weight is made of, are those of the rank's own part, and nothing adds them up.
# Output: without smoothing one rank 4.7231, two 4.7231 4.7231; with 0.1 one 4.5698, two 4.6133 4.4752
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 megatron-core==0.19.2
cat >smooth.py <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

LOGITS = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0)) * 2


def rank(number, folder, world):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=number, world_size=world)
    losses = []
    for smoothing in (0.0, 0.1):
        part, target = LOGITS.chunk(world, -1)[number].clone(), torch.tensor([[1, 3, 5, 7]])
        losses.append(vocab_parallel_cross_entropy(part, target, smoothing, dist.group.WORLD)[0, 0].item())
    torch.save(losses, f"{folder}/{world}_{number}")
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = sys.argv[1]
    for world in (1, 2):
        mp.spawn(rank, (folder, world), world)
    one, first, second = (torch.load(f"{folder}/{name}") for name in ("1_0", "2_0", "2_1"))
    print(f"without smoothing one rank {one[0]:.4f}, two {first[0]:.4f} {second[0]:.4f}; ", end="")
    print(f"with 0.1 one {one[1]:.4f}, two {first[1]:.4f} {second[1]:.4f}")
    assert max(one[0], first[0], second[0]) - min(one[0], first[0], second[0]) < 1e-5
    assert min(abs(one[1] - first[1]), abs(one[1] - second[1]), abs(first[1] - second[1])) > 0.01
PYTHON
"$PYTHON" smooth.py "$FOLDER" 2>/dev/null
