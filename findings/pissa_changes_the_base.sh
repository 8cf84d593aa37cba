#!/usr/bin/env bash
# PEFT 0.21.2: with init_lora_weights="pissa" the base weights are changed, too (the factors hold their largest part).
# With the adapter the model is the old one. With the adapter disabled or unloaded it is another, without a warning.
# So the base without its adapter is no reference policy.
# Output: with the adapter below 1e-5; disabled, unloaded: above 0.01
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0 peft==0.21.2
"$PYTHON" - 2>/dev/null <<'PYTHON'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model, tokens = LlamaForCausalLM(LlamaConfig(vocab_size=50, **shape)).eval(), torch.arange(8)[None]
with torch.no_grad():
    before = model(tokens).logits
    factors = LoraConfig(r=4, init_lora_weights="pissa", target_modules=["q_proj", "v_proj"])
    adapted = get_peft_model(model, factors).eval()
    whole = (adapted(tokens).logits - before).abs().max().item()
    with adapted.disable_adapter():
        disabled = (adapted(tokens).logits - before).abs().max().item()
    unloaded = (adapted.unload()(tokens).logits - before).abs().max().item()
print(f"with the adapter {whole:.2g}, disabled {disabled:.2g}, unloaded {unloaded:.2g}")
assert whole < 1e-5 and disabled > 0.01 and unloaded > 0.01
PYTHON
