#!/usr/bin/env bash
# transformers 5.24.0, torch 2.14.1: two sequences in one row with restarting position_ids see each other unless the
# call says use_cache=False.
# With it the second sequence has the logits of a row of its own; by default it attends to the first.
# Output: the largest difference of the second sequence's logits: above 0.01 by default, below 1e-6 without a cache
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0
"$PYTHON" - 2>/dev/null <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **shape)).eval()
row, positions = torch.arange(12)[None], torch.cat([torch.arange(5), torch.arange(7)])[None]
with torch.no_grad():
    alone = model(row[:, 5:], use_cache=False).logits
    kept = (model(row, position_ids=positions).logits[:, 5:] - alone).abs().max().item()
    off = (model(row, position_ids=positions, use_cache=False).logits[:, 5:] - alone).abs().max().item()
print(f"by default {kept:.2g}, with use_cache=False {off:.2g}")
assert kept > 0.01 and off < 1e-6
PYTHON
