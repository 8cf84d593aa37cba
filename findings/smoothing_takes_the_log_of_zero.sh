#!/usr/bin/env bash
# megatron-core 0.19.2 (torch 2.14.1, CPU): with label smoothing, vocab_parallel_cross_entropy is infinite as soon as one
# word's logit is some 104 below the largest, whichever word is the target.
# It takes the logarithm of probabilities, and that word's is 0 in float32. torch's cross_entropy, which subtracts
# logits, has a finite loss; without smoothing both agree.
# Output: a spread of 90: 10.0000 10.0000; of 110: inf 12.2222; of 110 without smoothing: 0.0000 0.0000 (megatron, torch)
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 megatron-core==0.19.2
cat >smooth.py <<'PYTHON'
import math
import sys

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from torch.nn.functional import cross_entropy

WORDS = 10


def losses(spread, smoothing):
    logits, target = torch.zeros(1, 1, WORDS), torch.tensor([[0]])
    logits[..., 1:] = -spread
    own = cross_entropy(logits[0], target[0], label_smoothing=smoothing * WORDS / (WORDS - 1)).item()
    return vocab_parallel_cross_entropy(logits, target, smoothing, dist.group.WORLD).item(), own


dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
near, far, plain = losses(90, 1 / 9), losses(110, 1 / 9), losses(110, 0.0)
pairs = [" ".join(f"{loss:.4f}" for loss in pair) for pair in (near, far, plain)]
print(f"a spread of 90: {pairs[0]}; of 110: {pairs[1]}; of 110 without smoothing: {pairs[2]} (megatron, torch)")
assert abs(near[0] - near[1]) < 1e-3 and math.isinf(far[0]) and math.isfinite(far[1]) and plain[0] == plain[1]
dist.destroy_process_group()
PYTHON
"$PYTHON" smooth.py "$FOLDER" 2>/dev/null
