"""The rows of a decode step that also reads drafted tokens: one for each token, with the keys before it.

A row is for every kernel what a request is in a step without drafts: a token, its cache slot, and the number of keys
that it reads. So its numbers have the same bits. All rows of a step write their keys before any row reads. Rows after
the first wrong draft of a request leave keys in slots that no row reads until they are written again.
Shapes: N requests, T rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megarl.mcore.inference.spread import spread


class DraftRows(NamedTuple):
    """The rows of a step: for each request, its last token and then its drafted ones."""

    requests: Tensor  # [T] int64 index of each row's request among those of the step
    positions: Tensor  # [T] int64 position of each row's token in its request
    padded_tokens: int  # of the step without drafts


def fit_to_blocks(context, counts: Tensor) -> Tensor:
    """Returns how many of `counts` [n] drafted tokens of each request the cache has room for; allocates their blocks.

    If the free blocks do not suffice for all, no request gets a further block.
    """
    n, size, blocks = context.total_request_count, context.block_size_tokens, context.kv_block_allocator
    offsets = context.request_last_kv_block_offset[:n].long()
    further = (offsets + counts) // size
    total = int(further.sum())
    if not total:
        return counts
    if min(blocks.get_active_avail(), blocks.total_avail) < total:
        return counts.minimum(size - 1 - offsets)
    rows, place = spread(further)
    columns = context.request_kv_block_counts[:n].long()[rows] + place
    context.request_to_kv_block_ids[rows, columns] = blocks.allocate_memory_blocks(total)
    return counts


def begin_step(context, tokens: Tensor, counts: Tensor):
    """Prepares a step in which each request reads its last token and drafted ones, whose blocks are allocated.

    Args:
        tokens: [Σ counts] int64 drafted ones.
        counts: [n] of each request.
    """
    c, n, is_ready = context, context.total_request_count, context.only_decodes
    if not is_ready:
        c.initialize_attention_state()  # after requests ended, Megatron's tensors have to be set anew
    c.only_decodes, c._plan = False, None
    requests, place = spread(counts + 1)
    positions = c.request_kv_length_offsets[:n].long()[requests] + place
    total, is_drafted = len(requests), place > 0
    padded = c.round_up_tokens(total)
    c.draft_rows, c.active_token_count = DraftRows(requests, positions, c.padded_active_token_count), total
    ids = c.token_to_input_ids[:n][requests]
    ids[is_drafted] = tokens
    c.token_to_input_ids[:total] = ids
    blocks = c.request_to_kv_block_ids[requests, positions // c.block_size_tokens]
    _set_tokens(c, blocks, positions, padded)
    c.padded_active_token_count = padded
    c.transfer_bookkeeping_to_gpu()


def accepted_counts(context, drawn: Tensor) -> Tensor:
    """Returns [n] how many rows of each request drew its next tokens: those whose earlier drafts are what was drawn.

    Args:
        drawn: [T] the token after each row.
    """
    requests = context.draft_rows.requests
    is_last = torch.ones(len(requests), dtype=torch.bool)
    is_last[:-1] = requests[1:] != requests[:-1]
    ends = is_last | context.end_tokens.contains(drawn)
    ends[:-1] |= drawn[:-1] != context.token_to_input_ids[1 : len(requests)]
    ends, last = ends.nonzero().flatten(), is_last.nonzero().flatten()
    first = torch.cat([last.new_zeros(1), last[:-1] + 1])
    return ends[torch.searchsorted(ends, first)] - first + 1


def end_step(context, counts: Tensor):
    """Keeps the first `counts` [n] ≥ 1 tokens of each request's rows, as if each had been decoded in a step of its own.

    Frees blocks that only later rows used. Afterwards the context is as in a step without drafts that has decoded the
    last of these tokens.
    """
    c, n, size = context, context.total_request_count, context.block_size_tokens
    last = c.request_kv_length_offsets[:n].long() + counts - 1
    used = last // size + 1
    pages = c.request_to_kv_block_ids[:n]
    is_unused = (torch.arange(pages.shape[1]) >= used.unsqueeze(1)) & (pages >= 0)
    if is_unused.any():
        c.kv_block_allocator.release_memory_blocks(pages[is_unused])
        pages.masked_fill_(is_unused, -1)
    blocks = pages.gather(1, used.unsqueeze(1) - 1).squeeze(1)
    c.request_kv_block_counts[:n], c.request_last_kv_block_id[:n] = used.int(), blocks
    c.request_last_kv_block_offset[:n], c.request_kv_length_offsets[:n] = (last % size).int(), last.int()
    c.padded_active_token_count, c.draft_rows, c.active_token_count = c.draft_rows.padded_tokens, None, n
    _set_tokens(c, blocks, last, c.padded_active_token_count)


def _set_tokens(context, blocks: Tensor, positions: Tensor, padded: int):
    """Sets the tokens of a step of `padded` tokens: their blocks and positions; padding is in the spare block."""
    c, count = context, len(positions)
    c.token_to_block_idx[:count] = blocks.to(c.token_to_block_idx.dtype)
    c.token_to_local_position_within_kv_block[:count] = positions % c.block_size_tokens
    c.token_to_pos_ids[:count] = c.token_to_position_in_request[:count] = positions
    c.token_to_block_idx[count:padded] = c.kv_block_allocator.dummy_block_idx
    c.token_to_local_position_within_kv_block[count:padded] = 0
    c.token_to_position_in_request[count:padded] = 0
