#!/usr/bin/env bash
# transformers 5.24.0: with a cache and without position_ids, Bamba's attention takes each call's first token for the
# first of the text, also if the attention mask is given. Its forward is then another model's, without a word. Granite's
# hybrid of the same layers, and Nemotron-H, go on from the cache's length. `generate` gives positions, and is right.
# Output: token by token against one forward: bamba without positions above 0.01, with them below 1e-4;
# granitemoehybrid without positions below 1e-4
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0
cat >positions.py <<'PYTHON'
import torch
from transformers import AutoModelForCausalLM, BambaConfig, GraniteMoeHybridConfig

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, pad_token_id=0,
)  # fmt: skip
KINDS = ["mamba", "attention"] * 2


def difference(model, tokens, with_positions):
    """Largest difference between logits token by token and those of one forward."""
    cache, steps = None, []
    for place in range(tokens.shape[1]):
        inputs = {"attention_mask": torch.ones(1, place + 1, dtype=torch.long)}
        if with_positions:
            inputs["position_ids"] = torch.tensor([[place]])
        out = model(tokens[:, place : place + 1], past_key_values=cache, use_cache=True, **inputs)
        cache, steps = out.past_key_values, [*steps, out.logits]
    return (torch.cat(steps, 1) - model(tokens, use_cache=False).logits).abs().max().item()


def random_model(config):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=2 * weight.shape[-1] ** -0.5)
    return model


with torch.no_grad():
    bamba = random_model(BambaConfig(**SIZES, attn_layer_indices=[1, 3]))
    granite = random_model(
        GraniteMoeHybridConfig(**SIZES, layer_types=KINDS, position_embedding_type="rope", num_local_experts=0)
    )
    tokens = torch.randint(1, 60, (1, 17))
    without, given, other = (
        difference(*each) for each in ((bamba, tokens, False), (bamba, tokens, True), (granite, tokens, False))
    )
print(f"bamba without positions {without:.2g}, with them {given:.2g}; granitemoehybrid without {other:.2g}")
assert without > 0.01 and given < 1e-4 and other < 1e-4
PYTHON
"$PYTHON" -W ignore positions.py 2>errors || { cat errors; exit 1; }
