#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.14.1, CPU): in Qwen2-VL, text after a video of more frames than rows or columns of tokens
# gets temporal positions that the video's later frames have, too.
# Positions go on by the larger of rows and columns, whatever the number of frames. Tokens of text and later frames are
# then at one time or in reverse; a video of few frames, and an image, end before their text.
# Output: 2 frames: video up to 4, text from 5; 8 frames: video up to 10, text from 5
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0
"$PYTHON" - 2>/dev/null <<'PYTHON'
import torch
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

VIDEO = 61
text = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
vision = dict(depth=1, embed_dim=32, hidden_size=32, num_heads=2)
config = Qwen2VLConfig(
    text_config=text | dict(intermediate_size=48), vision_config=vision, image_token_id=60, video_token_id=VIDEO,
    vision_start_token_id=62, vision_end_token_id=63,
)
model = Qwen2VLForConditionalGeneration(config).model


def last_and_next(frames):
    of_video = frames * 2 * 2  # 4 × 4 patches, merged 2 × 2
    tokens = torch.tensor([[5, 6, 62] + [VIDEO] * of_video + [63, 7]])
    kinds = 2 * (tokens == VIDEO).int()
    positions, _ = model.get_rope_index(tokens, kinds, video_grid_thw=torch.tensor([[frames, 4, 4]]))
    return positions[:, 0, 3 : 3 + of_video].max().item(), positions[:, 0, 3 + of_video :].min().item()


found = {frames: last_and_next(frames) for frames in (2, 8)}
print("; ".join(f"{frames} frames: video up to {last}, text from {next}" for frames, (last, next) in found.items()))
assert found == {2: (4, 5), 8: (10, 5)}
PYTHON
