#!/usr/bin/env bash
# PEFT 0.21.2, transformers 5.24.0: exclude_modules does not reach a router that target_modules="all-linear" chose.
# The router is among the adapted parameters, whose names exclude_modules is not compared with; a list of
# target_modules leaves it out.
# Output: all-linear without gate: router adapted; a list: not adapted
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0 peft==0.21.2
"$PYTHON" - 2>/dev/null <<'PYTHON'
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

shape = {"vocab_size": 50, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 16}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}


def is_router_adapted(**entries):
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **heads))
    model = get_peft_model(model, LoraConfig(r=2, **entries))
    return any("mlp.gate.lora_A" in name for name, _ in model.named_parameters())


excluded = is_router_adapted(target_modules="all-linear", exclude_modules=["gate"])
listed = is_router_adapted(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
shown = {True: "adapted", False: "not adapted"}
print(f"all-linear without gate: router {shown[excluded]}; a list: {shown[listed]}")
assert excluded and not listed
PYTHON
