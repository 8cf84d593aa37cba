#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.14.1, CPU): Bamba, Falcon-H1 and Zamba2 clamp Mamba-2's time steps to their configuration's
# limits in a forward pass over several tokens, and not in a step with a cache.
# So `generate` scores tokens by another model than the forward pass over the same sequence. With use_cache=False, or
# with limits that nothing reaches, it does not. Zamba2's default lower limit, 0.001, is enough to see it.
# Output: for each type: limited off by more than 0.01; unlimited, and limited without a cache, below 0.0001
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0
"$PYTHON" - 2>/dev/null <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

PROMPT = torch.arange(5, 14)[None]
COMMON = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, mamba_d_state=8,
)
HEADS = dict(num_hidden_layers=2, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_chunk_size=8)
ZAMBA = dict(
    num_hidden_layers=3, n_mamba_heads=4, mamba_headdim=16, mamba_ngroups=1, layer_types=["mamba", "hybrid", "mamba"],
    hybrid_layer_ids=[1], num_mem_blocks=1, adapter_rank=8, chunk_size=8, max_position_embeddings=64,
)
TYPES = {
    "bamba": (HEADS | dict(attn_layer_indices=[1]), dict(time_step_limit=(0.0, 0.5)), {}),
    "falcon_h1": (HEADS | dict(mamba_d_ssm=64), dict(time_step_limit=(0.0, 0.5)), {}),
    "zamba2": (ZAMBA, dict(time_step_min=1.5), dict(time_step_min=1e-9)),
}


@torch.no_grad()
def gap(kind, use_cache=True, **settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **COMMON, **settings)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    asked = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
    made = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), use_cache=use_cache, **asked)
    whole = model(made.sequences, use_cache=False).logits[0, PROMPT.shape[1] - 1 : -1]
    return float((torch.cat(made.logits) - whole).abs().max())


for kind, (sizes, limited, unlimited) in TYPES.items():
    off, free = gap(kind, **sizes, **limited), gap(kind, **sizes, **unlimited)
    uncached = gap(kind, False, **sizes, **limited)
    print(f"{kind}: limited off by {off:.4f}; unlimited {free:.4f}; limited without a cache {uncached:.4f}")
    assert off > 0.01 and free < 1e-4 and uncached < 1e-4
PYTHON
