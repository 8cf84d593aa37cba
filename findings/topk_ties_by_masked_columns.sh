#!/usr/bin/env bash
# torch 2.14.1 (CPU): which of several equal scores topk takes depends on how many masked columns (-inf) follow them.
# Scores 0 2 0 0 0 0 0 0, the four largest: the one with 2, and three of seven zeros, which differ with the padding.
# So a choice of keys or experts in a padded batch is not the choice of the sequence alone.
# Output: the number of different sets over paddings of 0, 1, 5, 100 and 2000 columns, above 1
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1
"$PYTHON" - <<'PYTHON'
import torch

scores = torch.tensor([0.0, 2, 0, 0, 0, 0, 0, 0])
sets = {}
for padding in (0, 1, 5, 100, 2000):
    masked = torch.cat([scores, torch.full((padding,), float("-inf"))])
    sets[padding] = tuple(sorted(torch.topk(masked, 4).indices.tolist()))
    print(f"{padding} masked columns: {sets[padding]}")
assert all(1 in chosen and max(chosen) < 8 for chosen in sets.values()) and len(set(sets.values())) > 1
PYTHON
