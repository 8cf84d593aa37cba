#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.14.1, CPU): after Qwen2-VL saw an image, a text without images is decoded at other positions.
# The model keeps the image's shift of positions. A forward pass with a cache adds it to each later step, although the
# step belongs to another sequence; before the image, and without a cache, the same calls are right.
# Output: a text's last token: before the image off by less than 0.0001, after it by more than 0.1
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0
"$PYTHON" - 2>/dev/null <<'PYTHON'
import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

IMAGE, PATCH = 60, 4
text = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    intermediate_size=48, rope_parameters={"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]},
)
vision = dict(depth=1, embed_dim=32, hidden_size=32, num_heads=2, patch_size=PATCH, mlp_ratio=2)
config = Qwen2VLConfig(
    text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=61, vision_start_token_id=62,
    vision_end_token_id=63,
)
torch.manual_seed(0)
model = Qwen2VLForConditionalGeneration(config).eval()
for parameter in model.parameters():
    if parameter.dim() > 1:
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
words = torch.tensor([[5, 17, 9, 33, 21, 40, 8]])


@torch.no_grad()
def off():
    first = model(words[:, :-1], use_cache=True)
    step = model(words[:, -1:], cache=first.cache, use_cache=True).logits[0, -1]
    return float((step - model(words, use_cache=False).logits[0, -1]).abs().max())


before = off()
grid = torch.tensor([[1, 4, 4]])
tokens = torch.tensor([[5, 62, IMAGE, IMAGE, IMAGE, IMAGE, 63, 7]])
with torch.no_grad():
    pixels = torch.randn(16, 3 * 2 * PATCH * PATCH)
    model(tokens, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=(tokens == IMAGE).int())
after = off()
print(f"a text's last token: before the image off by {before:.4f}, after it by {after:.4f}")
assert before < 1e-4 and after > 0.1
PYTHON
