"""The rows of a decode step that also reads drafted tokens: one for each token, with the keys before it.

A row is for every kernel what a request is in a step without drafts: a token, its cache slot, and the number of keys
that it reads. So its numbers have the same bits. All rows of a step write their keys before any row reads. Rows after
the first wrong draft of a request leave keys in slots that no row reads until they are written again.
Shapes: N requests, T rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class DraftRows(NamedTuple):
    """The rows of a step: for each request, its last token and then its drafted ones."""

    requests: Tensor  # [T] int64 index of each row's request among those of the step
    positions: Tensor  # [T] int64 position of each row's token in its request
    padded_tokens: int  # of the step without drafts


def fit_to_blocks(context, counts: list[int]) -> list[int]:
    """Returns how many of `counts` drafted tokens of each request the cache has room for; allocates their blocks.

    If the free blocks do not suffice for all, no request gets a further block.
    """
    n, size, blocks = context.total_request_count, context.block_size_tokens, context.kv_block_allocator
    offsets = context.request_last_kv_block_offset[:n].tolist()
    further = [(offset + count) // size for offset, count in zip(offsets, counts, strict=True)]
    total = sum(further)
    if not total:
        return counts
    if min(blocks.get_active_avail(), blocks.total_avail) < total:
        return [min(count, size - 1 - offset) for offset, count in zip(offsets, counts, strict=True)]
    rows = [i for i, more in enumerate(further) for _ in range(more)]
    known = context.request_kv_block_counts[:n].tolist()
    columns = [known[i] + j for i, more in enumerate(further) for j in range(more)]
    context.request_to_kv_block_ids[rows, columns] = blocks.allocate_memory_blocks(total)
    return counts


def begin_step(context, drafts: list[list[int]]):
    """Prepares a step in which each request reads its last token and `drafts`, whose blocks are allocated."""
    c, n, is_ready = context, context.total_request_count, context.only_decodes
    if not is_ready:
        c.initialize_attention_state()  # after requests ended, Megatron's tensors have to be set anew
    c.only_decodes, c._plan = False, None
    counts = torch.tensor([len(draft) + 1 for draft in drafts])
    requests = torch.repeat_interleave(torch.arange(n), counts)
    first = counts.cumsum(0) - counts
    positions = c.request_kv_length_offsets[:n].long()[requests] + torch.arange(len(requests)) - first[requests]
    padded = c.round_up_tokens(len(requests))
    c.draft_rows, c.active_token_count = DraftRows(requests, positions, c.padded_active_token_count), len(requests)
    tokens = [token for last, draft in zip(c.token_to_input_ids[:n].tolist(), drafts, strict=True)
              for token in (last, *draft)]  # fmt: skip
    c.token_to_input_ids[: len(tokens)] = torch.tensor(tokens)
    blocks = c.request_to_kv_block_ids[requests, positions // c.block_size_tokens]
    _set_tokens(c, blocks, positions, padded)
    c.padded_active_token_count = padded
    c.transfer_bookkeeping_to_gpu()


def end_step(context, counts: list[int]):
    """Keeps the first `counts` ≥ 1 tokens of each request's rows, as if each had been decoded in a step of its own.

    Frees blocks that only later rows used. Afterwards the context is as in a step without drafts that has decoded the
    last of these tokens.
    """
    c, n, size = context, context.total_request_count, context.block_size_tokens
    last = c.request_kv_length_offsets[:n].long() + torch.tensor(counts) - 1
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
