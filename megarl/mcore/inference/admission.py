"""Adds the prompts of all waiting requests that fit to the engine's next step, in a few tensor operations.

Megatron adds one request at a time, with some thirty tensor operations and an asyncio task for each. A rollout starts
hundreds together, which takes longer than the prefill of short prompts by a small model.
"""

import itertools

import torch

from megarl.mcore.inference.spread import spread


def can_add_together(engine) -> bool:
    """Whether `add_waiting` may take the place of Megatron's scheduling of whole prompts."""
    c = engine.context
    return not (c.enable_prefix_caching or c.is_hybrid_model or engine._cg_admission_gating_active())


def may_add(engine) -> bool:
    """Whether the next step may add a waiting request; False: it surely adds none."""
    if not engine.waiting_request_ids:
        return False
    return engine.enable_chunked_prefill or not can_add_together(engine) or _count_fitting(engine) > 0


def add_waiting(engine):
    """Moves requests from the engine's queue to its context, in their order, as long as they fit."""
    added = [engine.get_request(engine.waiting_request_ids.popleft()) for _ in range(_count_fitting(engine))]
    if not added:
        return
    _add(engine.context, added)
    for request in added:
        request.remaining_prompt_tokens = request.remaining_prompt_tokens.new_empty(0)
        request.add_event_add_context()


def _count_fitting(engine) -> int:
    """Returns how many of the first waiting requests fit to the next step."""
    c, count = engine.context, 0
    if c.paused_request_count:
        return 0
    tokens, blocks = c.max_tokens - c.active_token_count, c.kv_block_allocator.total_avail
    for number in itertools.islice(engine.waiting_request_ids, c.max_requests - c.total_request_count):
        length = engine.get_request(number).remaining_prompt_length
        tokens, blocks = tokens - length, blocks + (-length // c.block_size_tokens)
        if tokens < 0 or blocks < 0:
            break
        count += 1
    return count


def _add(context, added: list):
    """Sets the context's tensors for new requests with whole prompts."""
    c, size, n = context, context.block_size_tokens, len(added)
    new = slice(c.total_request_count, c.total_request_count + n)
    lengths = torch.tensor([request.remaining_prompt_length for request in added])
    outputs = torch.tensor([request.sampling_params.num_tokens_to_generate for request in added])
    counts = (lengths + size - 1) // size
    c.request_ids[new] = torch.tensor([request.request_id for request in added], dtype=c.request_ids.dtype)
    metadata = zip(*(request.tracked_metadata for request in added), strict=True)
    for (label, kind), values in zip(added[0].get_metadata_types(), metadata, strict=True):
        c.request_metadata[label][new] = torch.tensor(values, dtype=kind).to(c.request_metadata[label].device)
    c.request_query_lengths[new], c.request_in_prefill_status_tensor[new] = lengths.int(), 1
    c.request_output_lengths[new], c.request_kv_length_offsets[new] = (lengths + outputs).int(), 0
    blocks = c.kv_block_allocator.allocate_memory_blocks(int(counts.sum()))
    rows, columns = spread(counts)
    c.request_to_kv_block_ids[new.start + rows, columns] = blocks
    c.request_kv_block_counts[new] = counts.int()
    c.request_last_kv_block_id[new] = blocks[counts.cumsum(0) - 1]
    c.request_last_kv_block_offset[new] = ((lengths - 1) % size).int()

    rows, positions = spread(lengths)
    rows += new.start
    tokens = slice(c.active_token_count, c.active_token_count + len(rows))
    c.token_to_pos_ids[tokens] = c.token_to_position_in_request[tokens] = positions
    c.token_to_input_ids[tokens] = torch.cat([request.remaining_prompt_tokens for request in added]).cpu()
    c.token_to_request_idx[tokens] = rows.to(c.token_to_request_idx.dtype)
    c.token_to_block_idx[tokens] = c.request_to_kv_block_ids[rows, positions // size].to(c.token_to_block_idx.dtype)
    c.token_to_local_position_within_kv_block[tokens] = positions % size
    c.active_token_count = tokens.stop
    c.lifetime_prefill_token_count += len(rows)
    c.total_request_count = new.stop
    c.num_prefill_requests += n
