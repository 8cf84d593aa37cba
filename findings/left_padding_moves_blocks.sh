#!/usr/bin/env bash
# transformers 5.24.0: a text that is padded on the left, with mask and positions, is another text to three types.
# DeepSeek-V4 compresses, and MiniMax-M3 chooses, keys by blocks that begin at the row's first column, padding included;
# Llama 4 scales queries by their column in the row, beyond `floor_scale` columns. So a prompt in a batch with a longer
# one is answered otherwise than alone, as it is in GRPO's groups of different prompts. Padding on the right is harmless.
# Output: largest difference of logits by 3 columns of padding, left and right: llama 0 0; llama4_text 0.02 1e-06;
# deepseek_v4 3 2e-06; minimax_m3_vl_text 2 1e-06
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0
cat >padding.py <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(
    vocab_size=160, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    num_hidden_layers=4, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
INDEX = dict(index_n_heads=2, index_head_dim=16)
COMPRESSED = ["heavily_compressed_attention", "compressed_sparse_attention"] * 2
TYPES = {
    "llama": {},
    "llama4_text": dict(EXPERTS, num_experts_per_tok=1, intermediate_size_mlp=96, floor_scale=8),
    "deepseek_v4": dict(
        INDEX, moe_intermediate_size=96, q_lora_rank=24, num_experts_per_tok=2, n_routed_experts=4, hc_mult=2,
        layer_types=COMPRESSED, mlp_layer_types=["moe"] * 4, sliding_window=8, o_groups=2, o_lora_rank=16,
        index_topk=8, num_nextn_predict_layers=0, qk_rope_head_dim=8, partial_rotary_factor=0.5,
    ),
    "minimax_m3_vl_text": dict(
        EXPERTS | INDEX, shared_intermediate_size=32, rotary_dim=8, mlp_layer_types=["sparse"] * 4, index_block_size=4,
        index_topk_blocks=2, layer_types=["full_attention", "minimax_m3_sparse"] * 2,
    ),
}  # fmt: skip
COLUMNS = 3


def small_model(kind, entries):
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **SIZES | entries)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model


@torch.no_grad()
def differences(model, tokens):
    """Of a text's logits: padded on the left, and on the right, against alone."""
    padding = tokens.new_zeros(1, COLUMNS)
    alone, found = model(tokens).logits, []
    for parts, kept in (((padding, tokens), slice(COLUMNS, None)), ((tokens, padding), slice(-COLUMNS))):
        row = torch.cat(parts, 1)
        mask = (row != 0).long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(row, attention_mask=mask, position_ids=positions).logits[:, kept]
        found.append((logits - alone).abs().max().item())
    return found


tokens = torch.randint(3, 160, (1, 21), generator=torch.Generator().manual_seed(1))
for kind, entries in TYPES.items():
    left, right = differences(small_model(kind, entries), tokens)
    print(f"{kind} {left:.1g} {right:.1g}", end="; " if kind != list(TYPES)[-1] else "\n")
    assert right < 1e-4 and (left < 1e-4 if kind == "llama" else left > 1e-3)
PYTHON
"$PYTHON" -W ignore padding.py 2>errors || { cat errors; exit 1; }
