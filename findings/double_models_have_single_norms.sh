#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.14.1, CPU): a Llama in float64 computes its norms in float32, so that its log-probs are
# no reference of 1e-10 or better for a float32 model's.
# The parameters, and all that a layer hands over, are float64. torch's own RMSNorm with the same weights stays in
# float64.
# Output: Llama with torch's norms off by more than 1e-8; one norm off by more than 1e-9, dtype torch.float64
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0
"$PYTHON" - 2>/dev/null <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, rms_norm_eps=1e-6
)
model = LlamaForCausalLM(config).double().eval()
tokens = torch.arange(40)[None]


@torch.no_grad()
def logprobs():
    return model(tokens, use_cache=False).logits.log_softmax(-1)


def torchs(norm):
    own = torch.nn.RMSNorm(64, eps=1e-6, dtype=torch.float64)
    own.weight.data = norm.weight.data
    return own


numbers = torch.randn(100, 64, dtype=torch.float64)
with torch.no_grad():
    normed = model.model.norm(numbers)
    one = float((normed - torchs(model.model.norm)(numbers)).abs().max())
given = logprobs()
model.model.norm = torchs(model.model.norm)
for layer in model.model.layers:
    layer.input_layernorm = torchs(layer.input_layernorm)
    layer.post_attention_layernorm = torchs(layer.post_attention_layernorm)
whole = float((given - logprobs()).abs().max())
print(f"Llama with torch's norms off by {whole:.1e}; one norm off by {one:.1e}, dtype {normed.dtype}")
assert whole > 1e-8 and one > 1e-9 and normed.dtype == given.dtype == torch.float64
PYTHON
