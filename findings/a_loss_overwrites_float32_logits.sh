#!/usr/bin/env bash
# megatron-core 0.19.2 (torch 2.14.1, CPU): vocab_parallel_cross_entropy leaves probabilities where float32 logits were, and
# leaves bfloat16 logits alone.
# It works in place on logits.float(), which for float32 is the caller's own tensor. A second loss or an entropy of the
# same logits is thus right in bfloat16 and another number in float32, with no error, also where gradients are taken.
# Output: the second loss minus the first: bfloat16 0.0000, float32 above 0.1
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 megatron-core==0.19.2
cat >twice.py <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy


def change(dtype):
    hidden = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    logits, target = hidden * 2, torch.tensor([[1, 3, 5, 7]])
    first, second = (vocab_parallel_cross_entropy(logits, target, 0.0, dist.group.WORLD) for _ in range(2))
    return float((second - first).abs().max())


dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
narrow, wide = change(torch.bfloat16), change(torch.float32)
print(f"the second loss minus the first: bfloat16 {narrow:.4f}, float32 {wide:.4f}")
assert narrow == 0 and wide > 0.1
dist.destroy_process_group()
PYTHON
"$PYTHON" twice.py "$FOLDER" 2>/dev/null
