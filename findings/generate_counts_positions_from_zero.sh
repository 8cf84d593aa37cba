#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.14.1, CPU): `generate` of a causal RoBERTa, CamemBERT, XLM-RoBERTa or data2vec-text scores
# the first new token at other positions than the model's own forward pass does on the same prompt: it hands over
# positions from 0, while the embeddings of these models count from padding_idx + 1 when they are given none.
# Output: for each type, off by more than 0.01; with positions from 0 in the forward pass 0.0000
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0
"$PYTHON" - <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

PROMPT = torch.tensor([[0, 5, 9, 7, 11]])
SIZES = dict(
    vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
    max_position_embeddings=40, is_decoder=True, pad_token_id=1, bos_token_id=0, eos_token_id=2,
)


@torch.no_grad()
def differences(kind):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).eval()
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.5)
    asked = dict(max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True)
    generated = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **asked).logits[0][0]
    from_zero = torch.arange(PROMPT.shape[1])[None]
    own, zero = model(PROMPT).logits[0, -1], model(PROMPT, position_ids=from_zero).logits[0, -1]
    return float((own - generated).abs().max()), float((zero - generated).abs().max())


for kind in ("roberta", "camembert", "xlm-roberta", "data2vec-text"):
    off, zero = differences(kind)
    print(f"{kind}: off by {off:.4f}; with positions from 0 in the forward pass {zero:.4f}")
    assert off > 0.01 and zero < 1e-4
PYTHON
