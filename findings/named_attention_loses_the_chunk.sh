#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.14.1, CPU): an attention function under a new name gets no mask, without a warning.
# The function calls transformers' own SDPA attention and does nothing else. With Llama 4, whose layers see chunks, the
# logits change; within the first chunk, and with a mask function under the same name, they do not.
# Output: first chunk 0.0000; whole sequence off by more than 0.1; with a mask function 0.0000
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0
"$PYTHON" - <<'PYTHON'
import torch
from transformers import AttentionInterface, AttentionMaskInterface, Llama4ForCausalLM, Llama4TextConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

CHUNK = 8
AttentionInterface.register("renamed", sdpa_attention_forward)
torch.manual_seed(0)
config = Llama4TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=2, attention_chunk_size=CHUNK,
)
model = Llama4ForCausalLM(config).eval()
for parameter in model.parameters():
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
tokens = torch.randint(64, (1, 3 * CHUNK))


@torch.no_grad()
def logits(attention):
    model.set_attn_implementation(attention)
    return model(tokens).logits[0]


wanted, without = logits("sdpa"), logits("renamed")
AttentionMaskInterface.register("renamed", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
with_mask = logits("renamed")
first = float((wanted - without)[:CHUNK].abs().max())
off, mended = float((wanted - without).abs().max()), float((wanted - with_mask).abs().max())
print(f"first chunk {first:.4f}; whole sequence off by {off:.4f}; with a mask function {mended:.4f}")
assert first < 1e-5 and off > 0.1 and mended < 1e-5
PYTHON
