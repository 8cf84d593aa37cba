#!/usr/bin/env bash
# transformers 5.24.0: Jamba forgets its state at each chunk of a prompt. A forward of several tokens with a cache begins
# its Mamba layers anew; of one token it goes on. So `generate(prefill_chunk_size=…)` gives other text without a word,
# and a conversation that is continued with several tokens at once is another one. FalconH1, asked the same, goes on.
# Output: largest difference of logits from one forward: jamba in chunks of 4: above 0.1, token by token: below 1e-4;
# falcon_h1 in chunks of 4: below 1e-4; the same greedy text with prefill_chunk_size=4: jamba False, falcon_h1 True
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0
cat >chunks.py <<'PYTHON'
import torch
from transformers import FalconH1Config, FalconH1ForCausalLM, JambaConfig, JambaForCausalLM

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, mamba_d_state=8, pad_token_id=0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
JAMBA = dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_dt_rank=4, use_mamba_kernels=False)
FALCON = dict(head_dim=8, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1)


def random_weights(model):
    """The model with weights large enough that layers say something."""
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model.eval()


@torch.no_grad()
def difference(model, tokens, size):
    """Largest difference between logits of one forward and those of chunks with a cache."""
    cache, parts = None, []
    for chunk in tokens.split(size, 1):
        out = model(chunk, past_key_values=cache, use_cache=True)
        cache, parts = out.past_key_values, [*parts, out.logits]
    return (torch.cat(parts, 1) - model(tokens, use_cache=False).logits).abs().max().item()


def is_same_text(model, tokens):
    whole, chunks = (
        model.generate(tokens, do_sample=False, max_new_tokens=32, **options)
        for options in ({}, {"prefill_chunk_size": 4})
    )
    return torch.equal(whole, chunks)


torch.manual_seed(1)
jamba = random_weights(JambaForCausalLM(JambaConfig(**SIZES, **JAMBA)))
falcon = random_weights(FalconH1ForCausalLM(FalconH1Config(**SIZES, **FALCON)))
tokens = torch.randint(1, 60, (1, 18))
chunks, steps, other = difference(jamba, tokens, 4), difference(jamba, tokens, 1), difference(falcon, tokens, 4)
same = is_same_text(jamba, tokens), is_same_text(falcon, tokens)
print(f"jamba in chunks of 4: {chunks:.2g}, token by token: {steps:.2g}; falcon_h1 in chunks of 4: {other:.2g}")
print(f"the same greedy text with prefill_chunk_size=4: jamba {same[0]}, falcon_h1 {same[1]}")
assert chunks > 0.1 and steps < 1e-4 and other < 1e-4 and same == (False, True)
PYTHON
"$PYTHON" -W ignore chunks.py 2>errors || { cat errors; exit 1; }
