#!/usr/bin/env bash
# torch 2.14.1 (CPU, x86 with AVX2 or AVX-512, one thread): sigmoid of a tensor of equal numbers has two values.
# The last elements, which fill no whole vector, are computed by another exp. A probability of a mixture of experts, or
# SiLU's gate, thus depends on how many tokens are computed together. With the length a multiple of 32 it does not.
# Output: of 400 numbers with two values: 37 elements: more than 0; 64 elements: 0
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1
"$PYTHON" - <<'PYTHON'
import torch

torch.set_num_threads(1)
numbers = torch.rand(400, generator=torch.Generator().manual_seed(0)) * 4
unequal = {
    size: sum(len(torch.full((size,), number).sigmoid().unique()) > 1 for number in numbers.tolist())
    for size in (37, 64)
}
print(f"of 400 numbers with two values: 37 elements: {unequal[37]}; 64 elements: {unequal[64]}")
assert unequal[37] > 0 and unequal[64] == 0
PYTHON
