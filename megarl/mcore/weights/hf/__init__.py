"""Hugging Face folders as one more layout of the same weights: import, export, and configurations as Megatron's flags.

A family (`families`) says which tensors of a folder are rows of which of Megatron's weights. The coordinates of
Megatron's checkpoints do not depend on the layout, so a rank reads just the slices that it holds, and an export is a
weight transfer whose destination is a folder.
"""
