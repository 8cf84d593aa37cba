"""LoRA (2106.09685): a role trains low-rank factors of its linear layers; the weights themselves stay as they are.

In fp32 each layer's weight holds the merged W + s·B·A, so that forward passes, rollout and weight transfer are those of
any model; only the backward pass of the layer is low-rank. In 16 bits small updates would vanish in a merged weight, so
x·Wᵀ + s·(x·Aᵀ)·Bᵀ is computed in training and in the rollout.
"""
