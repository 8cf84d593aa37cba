#!/usr/bin/env bash
# torch 2.14.1 (CPU), a processor with bfloat16 instructions: a row of a product in bfloat16 depends on how many rows
# there are. Up to 16^3 multiplications linear() sums in another order than above. 2^25 + 62 - 2^25, with 4 columns:
# Output: 16 rows: 58, 17 rows: 1
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1
"$PYTHON" - <<'PYTHON'
import torch

rows, weight = torch.ones(40, 64, dtype=torch.bfloat16), torch.ones(4, 64, dtype=torch.bfloat16)
weight[:, 0], weight[:, -1] = 2.0**25, -(2.0**25)
found = {n: torch.nn.functional.linear(rows[:n], weight).unique() for n in (4, 16, 17, 40)}
assert all(len(values) == 1 for values in found.values())
print(", ".join(f"{n} rows: {int(found[n])}" for n in (16, 17)))
assert found[4] == found[16] == 58 and found[17] == found[40] == 1
PYTHON
