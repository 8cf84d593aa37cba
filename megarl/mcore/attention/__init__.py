"""Attention over packed (THD) sequences in training and over the paged KV cache in rollout."""
