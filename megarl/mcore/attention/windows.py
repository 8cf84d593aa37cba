"""Sliding-window attention (2004.05150 §3.1): which layers have a window, and which keys of a segment it leaves.

With `--window-size N,0` a token sees itself and the N tokens before it, as in Megatron and Transformer Engine: a
Hugging Face `sliding_window` of W is `--window-size W-1,0`. `--window-attn-skip-freq` names the layers without window.

A key outside the window is masked, so its softmax weight is exactly 0. Whole blocks of keys that no query of a segment
sees are not read; that keeps the bits, because the CPU kernel sums key blocks of `KEY_BLOCK` one after another.
"""

import numpy as np
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megarl.mcore.expand_counts import expand_array_counts

FULL, WINDOW = 0, 1  # kinds of layers: plans by kind are pairs with these indices
KEY_BLOCK = 512  # keys that torch's CPU kernel takes at a time (kvSplitSize); a multiple of the cache's blocks


def window_of(config) -> int | None:
    """Returns the number of tokens, itself included, that a token sees in layers with a window; None: no such layer."""
    return None if config.window_size is None else config.window_size[0] + 1


def kind_of_layer(config, layer_number: int) -> int:
    """Returns `FULL` or `WINDOW`; `layer_number` counts from 1 over the whole model."""
    return WINDOW if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number) else FULL


def cut_segments(queries: np.ndarray, keys: np.ndarray, window: int) -> tuple[np.ndarray, ...]:
    """Cuts segments longer than the window, so that each piece reads at most about two windows of keys.

    Args:
        queries, keys: [n] numbers of queries, which are the last positions, and of keys.

    Returns:
        Arrays [m]: the segment of each piece, index of its first query in it, numbers of queries and keys as if the
        piece were a segment, and how many of the first keys no query sees.
    """
    step = -(-window // KEY_BLOCK) * KEY_BLOCK
    first, is_cut = keys - queries, keys > window
    counts = np.where(is_cut, (keys - 1) // step - first // step + 1, 1)
    segment, piece = expand_array_counts(counts)
    start = (first[segment] // step + piece) * step
    start = np.where(is_cut[segment], start.clip(min=first[segment]), first[segment])
    end = np.where(is_cut[segment], ((start // step) + 1) * step, keys[segment]).clip(max=keys[segment])
    unseen = (start + 1 - window).clip(min=0) // KEY_BLOCK * KEY_BLOCK
    return segment, start - first[segment], end - start, end, unseen


def drop_unseen(keys: Tensor, pages: Tensor, window: int, block: int) -> tuple[Tensor, Tensor]:
    """Drops the cache blocks that decodes do not see: keys [n] and pages [n, P] -> the same, without them.

    `block`: tokens of a cache block.
    """
    unseen = (keys - window).clamp(min=0) // KEY_BLOCK * KEY_BLOCK
    columns = (unseen // block).unsqueeze(1) + keys.new_ones(pages.shape[1]).cumsum(0) - 1
    return keys - unseen, pages.gather(1, columns.clamp(max=pages.shape[1] - 1))
