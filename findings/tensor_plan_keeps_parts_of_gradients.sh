#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.14.1, CPU, gloo, two ranks): with tp_plan="auto" some gradients are one rank's part of them.
# Apertus's activation has learned slopes, and GLM-4.5's heads have norms, that each rank applies to its own columns or
# heads. Their types' plans do not name them, so that nobody adds the parts. The loss is right, and Qwen3, whose plan
# names its norms of heads, has the gradients of one process.
# Output: loss equal; the worst gradient's distance from one process: apertus and glm4_moe above 0.1, qwen3 below 0.0001
source "$(dirname "${BASH_SOURCE[0]}")/environment.bash"
need torch==2.14.1 transformers==5.24.0
cat >plans.py <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1)
TYPES = {"apertus": {}, "glm4_moe": EXPERTS | dict(use_qk_norm=True), "qwen3": {}}


def loss_and_gradients(kind, **how):
    model = AutoModelForCausalLM.from_pretrained(kind, dtype=torch.float32, **how)
    tokens = torch.arange(3, 27).reshape(2, 12)
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    whole = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in whole.items()}


def rank(number, store, kind):
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    loss, found = loss_and_gradients(kind, tp_plan="auto")
    if number == 0:
        torch.save((loss, found), "two")
    dist.destroy_process_group()


def main(folder):
    for kind, more in TYPES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **more))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        model.save_pretrained(kind)
        loss, wanted = loss_and_gradients(kind)
        mp.spawn(rank, (f"{folder}/store_{kind}", kind), 2)
        split_loss, found = torch.load("two")
        off = {
            name: float((found[name] - gradient).abs().max() / gradient.abs().max())
            for name, gradient in wanted.items()
            if found[name].shape == gradient.shape
        }
        worst = max(off, key=off.get)
        print(f"{kind}: loss {loss:.4f} and {split_loss:.4f}; {worst} off by {off[worst]:.2g}")
        assert abs(loss - split_loss) < 1e-5
        assert off[worst] < 1e-4 if kind == "qwen3" else off[worst] > 0.1


if __name__ == "__main__":
    main(sys.argv[1])
PYTHON
"$PYTHON" plans.py "$FOLDER" 2>/dev/null
