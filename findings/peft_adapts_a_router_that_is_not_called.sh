#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.24.0 (torch 2.14.1, CPU): low-rank factors on all linear layers of LongCat-Flash include
# those of its routers, which never take part: the router multiplies by its classifier's weight and does not call the
# classifier. Nothing warns: the factors get no gradient, and any values of theirs leave the logits as they are.
# Output: router's factors: no gradient, logits change by 0; another layer's factors: gradient, logits change
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0 peft==0.21.2
"$PYTHON" - <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

torch.manual_seed(0)
config = LongcatFlashConfig(
    vocab_size=64, hidden_size=32, ffn_hidden_size=48, expert_ffn_hidden_size=16, num_layers=2, num_attention_heads=2,
    num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    head_dim=8, n_routed_experts=4, zero_expert_num=2, moe_topk=2, max_position_embeddings=64,
)
model = get_peft_model(LongcatFlashForCausalLM(config), LoraConfig(target_modules="all-linear", r=4)).eval()
tokens = torch.randint(64, (1, 12))
model(input_ids=tokens).logits.square().sum().backward()
factors = {name: each for name, each in model.named_parameters() if "lora_B" in name}


@torch.no_grad()
def change(names):
    before = model(input_ids=tokens).logits
    for name in names:
        factors[name].normal_()
    after = model(input_ids=tokens).logits
    for name in names:
        factors[name].zero_()
    return float((after - before).abs().max())


routers = [name for name in factors if "router" in name]
others = [name for name in factors if "q_a_proj" in name]
print(f"{len(routers)} factors of routers: gradients {[factors[name].grad for name in routers]}, change {change(routers)}")
print(f"{len(others)} of queries: change {change(others):.4f}")
assert routers and others
assert all(factors[name].grad is None for name in routers) and change(routers) == 0
assert all(factors[name].grad.abs().max() > 0 for name in others) and change(others) > 1e-4
PYTHON
