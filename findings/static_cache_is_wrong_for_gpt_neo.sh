#!/usr/bin/env bash
# transformers 5.24.0: greedy text of GPT-Neo with cache_implementation="static" is another one than with the default
# cache, which agrees with no cache at all. Nothing warns. It takes local layers: with global ones alone all agree.
# Output: local and global layers: static differs from dynamic True, no cache differs from dynamic False
# global layers alone: static differs from dynamic False
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0
cat >static.py <<'PYTHON'
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

SIZES = dict(
    vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, window_size=8, max_position_embeddings=64,
    pad_token_id=0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def texts(kinds):
    """Greedy texts of a model with such layers: default cache, static cache, none."""
    torch.manual_seed(0)
    model = GPTNeoForCausalLM(GPTNeoConfig(**SIZES, attention_types=[[kinds, 1]])).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    prompt = torch.randint(1, 60, (1, 11))
    options = {}, {"cache_implementation": "static"}, {"use_cache": False}
    return [model.generate(prompt, do_sample=False, max_new_tokens=20, **each).tolist() for each in options]


default, static, none = texts(["global", "local"])
plain, plain_static, _ = texts(["global", "global"])
print(f"local and global layers: static differs from dynamic {static != default}, ", end="")
print(f"no cache differs from dynamic {none != default}")
print(f"global layers alone: static differs from dynamic {plain_static != plain}")
assert static != default and none == default and plain_static == plain
PYTHON
"$PYTHON" -W ignore static.py 2>errors || { cat errors; exit 1; }
