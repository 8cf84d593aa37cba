#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.14.1, Pillow 13.0.0): Qwen2-VL's image processor makes more pixels, and tokens, of a narrow
# image than max_pixels allows.
# It shrinks both sides by one factor and then raises the short one to 28, without shrinking the long one further. So a
# budget of tokens that is reckoned from max_pixels is exceeded, here by up to five times; a square keeps within it.
# Output: 20 × 2000 of 3136: 20 tokens for 4; 60 × 10000 of 50176: 103 tokens for 64; 900 × 900 of 50176: 64 tokens for 64
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0 pillow==13.0.0
"$PYTHON" - 2>/dev/null <<'PYTHON'
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

PIXELS_OF_A_TOKEN = 28 * 28


def tokens(width, height, max_pixels):
    processor = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=max_pixels)
    made = processor(images=[Image.new("RGB", (width, height))], return_tensors="pt")
    return made["image_grid_thw"].prod().item() // 4


cases = ((20, 2000, 3136), (60, 10000, 50176), (900, 900, 50176))
found = [(tokens(*case), case[2] // PIXELS_OF_A_TOKEN) for case in cases]
said = (
    f"{width} × {height} of {most}: {made} tokens for {allowed}"
    for (width, height, most), (made, allowed) in zip(cases, found, strict=True)
)
print("; ".join(said))
assert found == [(20, 4), (103, 64), (64, 64)]
PYTHON
