#!/usr/bin/env bash
# PEFT 0.21.2, transformers 5.24.0: target_modules="all-linear" on a mixture of experts adds factors to the router
# (mlp.gate) and to the stacked experts.
# The router is a parameter of shape [experts, hidden], and is trained like a projection.
# Output: the modules with factors: experts, experts.base_layer, gate, k_proj, o_proj, q_proj, v_proj
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0 peft==0.21.2
"$PYTHON" - 2>/dev/null <<'PYTHON'
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

shape = {"vocab_size": 50, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 16}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **heads))
model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
names = [name.split(".lora_")[0] for name, value in model.named_parameters() if value.requires_grad]
found = sorted({name.removeprefix("base_model.model.model.layers.0.").split(".", 1)[1] for name in names})
print(", ".join(found))
assert found == ["experts", "experts.base_layer", "gate", "k_proj", "o_proj", "q_proj", "v_proj"]
PYTHON
