#!/usr/bin/env bash
# torch 2.14.1 (CPU): 1,000 ones in bfloat16 are 1,000 by sum, cumsum, dot and scatter_add_, and 256 by index_add_.
# 256 + 1 rounds to 256 in bfloat16; index_add_ adds in bfloat16, the others in a wider type.
# Output: sum 1000, cumsum 1000, dot 1000, scatter_add_ 1000, index_add_ 256
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1
"$PYTHON" - <<'PYTHON'
import torch

ones, first = torch.ones(1000, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.long)
empty = torch.zeros(1, dtype=torch.bfloat16)
found = {
    "sum": ones.sum(),
    "cumsum": ones.cumsum(0)[-1],
    "dot": ones.dot(ones),
    "scatter_add_": empty.clone().scatter_add_(0, first, ones),
    "index_add_": empty.clone().index_add_(0, first, ones),
}
found = {name: int(value) for name, value in found.items()}
print(", ".join(f"{name} {value}" for name, value in found.items()))
assert found.pop("index_add_") == 256 and set(found.values()) == {1000}
PYTHON
