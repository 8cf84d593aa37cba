#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.14.1, CPU): Kimi-Linear's dense layers are saved under another name than they are read from.
# A folder with model.layers.0.mlp.gate_proj.weight, as published ones have it, is read and saved again with
# model.layers.0.block_sparse_moe.gate_proj.weight: the way back from `mlp` to the experts' name does not ask whether a
# layer has experts. transformers reads both; a reader of names finds no dense layer.
# Output: read from mlp, saved as block_sparse_moe
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0 safetensors==0.8.0
"$PYTHON" - 2>/dev/null <<'PYTHON'
import torch
from safetensors.torch import load_file, save_file
from transformers import KimiLinearConfig, KimiLinearForCausalLM

torch.manual_seed(0)
config = KimiLinearConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    linear_head_dim=8, linear_num_heads=2, num_local_experts=4, num_experts_per_tok=2,
    mlp_layer_types=["dense", "sparse"], layer_types=["linear_attention", "full_attention"], pad_token_id=0,
    bos_token_id=1, eos_token_id=2,
)


def parent_of(weights):
    (name,) = [name for name in weights if name.startswith("model.layers.0.") and name.endswith(".gate_proj.weight")]
    return name.split(".")[3]


KimiLinearForCausalLM(config).save_pretrained("first")
weights = load_file("first/model.safetensors")
weights = {name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): weight for name, weight in weights.items()}
save_file(weights, "first/model.safetensors", metadata={"format": "pt"})
read = KimiLinearForCausalLM.from_pretrained("first")
gate = "model.layers.0.mlp.gate_proj.weight"
assert torch.equal(read.state_dict()[gate], weights[gate])
read.save_pretrained("again")
names = parent_of(weights), parent_of(load_file("again/model.safetensors"))
print(f"read from {names[0]}, saved as {names[1]}")
assert names == ("mlp", "block_sparse_moe")
PYTHON
