#!/usr/bin/env bash
# transformers 5.24.0: a head_dim that a BailingHybrid configuration is given is replaced by qk_rope_head_dim.
# The given number becomes linear_head_dim, the size of a head in linear attention. A config.json with head_dim 128 and
# qk_rope_head_dim 64 is saved again with head_dim 64: whoever takes the linear layers' size from head_dim, as in the
# file that was read, finds other shapes than the weights have. Without the new key it comes back as 64.
# Output: given 128: head_dim 64, linear_head_dim 128; saved without linear_head_dim and read: 64
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need transformers==5.24.0
"$PYTHON" - 2>/dev/null <<'PYTHON'
import json
from pathlib import Path

from transformers import BailingHybridConfig

Path("config.json").write_text(json.dumps({"model_type": "bailing_hybrid", "head_dim": 128, "qk_rope_head_dim": 64}))
read = BailingHybridConfig.from_pretrained(".")
read.save_pretrained("again")
saved = json.loads(Path("again/config.json").read_text())
assert saved["head_dim"] == read.head_dim
del saved["linear_head_dim"]
Path("again/config.json").write_text(json.dumps(saved))
again = BailingHybridConfig.from_pretrained("again").linear_head_dim
print(f"given 128: head_dim {read.head_dim}, linear_head_dim {read.linear_head_dim}; ", end="")
print(f"saved without linear_head_dim and read: {again}")
assert (read.head_dim, read.linear_head_dim, again) == (64, 128, 64)
PYTHON
