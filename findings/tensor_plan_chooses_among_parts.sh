#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.14.1, CPU, gloo, two ranks): with tp_plan="auto" Gemma 3n is another model on two ranks.
# Its sparse layers keep the activations that exceed a bound of mean and deviation over the layer's width. The plan
# splits that width, so that each rank takes mean and deviation of its own half. Nothing warns; without sparsity the
# ranks have the loss of one process.
# Output: sparse: losses differ by more than 0.001; without sparsity by less than 0.00001
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0
cat >plans.py <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

SIZES = dict(
    vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, hidden_size_per_layer_input=8, intermediate_size=48,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, laurel_rank=8, altup_num_inputs=2,
    num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"], pad_token_id=0, bos_token_id=1,
    eos_token_id=2,
)


@torch.no_grad()
def loss(folder, **how):
    model = Gemma3nForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    tokens = torch.arange(3, 27).reshape(2, 12)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss.item()


def rank(number, store, folder):
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    split = loss(folder, tp_plan="auto")
    if number == 0:
        torch.save(split, "two")
    dist.destroy_process_group()


def difference(share, folder):
    torch.manual_seed(0)
    model = Gemma3nForCausalLM(Gemma3nTextConfig(**SIZES, activation_sparsity_pattern=[share, 0.0]))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    mp.spawn(rank, (f"{folder}.store", folder), 2)
    return abs(loss(folder) - torch.load("two"))


if __name__ == "__main__":
    sparse, full = (difference(share, f"{sys.argv[1]}/share_{share}") for share in (0.9, 0.0))
    print(f"sparse: losses differ by {sparse:.4f}; without sparsity by {full:.6f}")
    assert sparse > 1e-3 and full < 1e-5
PYTHON
"$PYTHON" plans.py "$FOLDER" 2>/dev/null
