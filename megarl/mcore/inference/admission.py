"""Adds the prompts of all waiting requests that fit to the engine's next step, in a few tensor operations.

Megatron adds one request at a time, with some thirty tensor operations and an asyncio task for each. A rollout starts
hundreds together, which takes longer than the prefill of short prompts by a small model.
"""

from typing import Any

import torch

from megarl.batch import expand_counts

# A request that fits to the next step, the cached blocks of its prompt, and tokens of them that are not read again.
Fitting = tuple[Any, list[int], int]


def may_add(engine) -> bool:
    """Whether the next step may add a waiting request; False: it surely adds none."""
    if not engine.waiting_request_ids:
        return False
    return engine.enable_chunked_prefill or bool(_fitting(engine, 1))


def add_waiting(engine):
    """Moves requests from the engine's queue to its context, in their order, as long as they fit. With prefix caching,
    a request whose prefix this step computes for another one waits until it is cached."""
    added = _fitting(engine, len(engine.waiting_request_ids))
    if not added:
        return
    _add(engine.context, added)
    for request, _, _ in added:
        engine.waiting_request_ids.remove(request.request_id)
        request.remaining_prompt_tokens = request.remaining_prompt_tokens.new_empty(0)
        request.add_event_add_context()


def _fitting(engine, max_count: int) -> list[Fitting]:
    """Returns the first waiting requests that fit to the next step, at most `max_count`."""
    c, blocks = engine.context, engine.context.kv_block_allocator
    max_count = min(max_count, c.max_requests - c.total_request_count)
    if c.paused_request_count or max_count <= 0:
        return []
    tokens, room = c.max_tokens - c.active_token_count, blocks.available
    found: list[Fitting] = []
    computed: set[int] = set()  # hashes of blocks that the step computes
    used: set[int] = set()  # cached blocks that are used again
    for number in engine.waiting_request_ids:
        request = engine.get_request(number)
        if not computed.isdisjoint(c.hashes_to_find(request)):
            continue
        cached, fresh, _, _, skipped, length = c._compute_prefix_match(request, request.remaining_prompt_length)
        new = set(cached) - used if cached else ()
        if new:  # those that no request uses count as room
            room -= int((blocks.block_ref_counts[list(new)] == 0).sum())
        tokens, room = tokens - length, room - fresh
        if tokens < 0 or room < 0:
            break
        used.update(new)
        computed.update(c.hashes_to_keep(request, len(cached)))
        found.append((request, cached, skipped))
        if len(found) == max_count:
            break
    return found


def _add(context, added: list[Fitting]):
    """Sets the context's tensors for new requests with whole prompts."""
    c, size = context, context.block_size_tokens
    n, requests = len(added), [request for request, _, _ in added]
    new = slice(c.total_request_count, c.total_request_count + n)
    lengths = torch.tensor([request.remaining_prompt_length for request in requests])
    outputs = torch.tensor([request.sampling_params.num_tokens_to_generate for request in requests])
    skipped = torch.tensor([skipped for _, _, skipped in added])
    c.request_ids[new] = torch.tensor([request.request_id for request in requests], dtype=c.request_ids.dtype)
    metadata = zip(*(request.tracked_metadata for request in requests), strict=True)
    for (label, kind), values in zip(requests[0].get_metadata_types(), metadata, strict=True):
        c.request_metadata[label][new] = torch.tensor(values, dtype=kind).to(c.request_metadata[label].device)
    c.request_query_lengths[new], c.request_in_prefill_status_tensor[new] = (lengths - skipped).int(), 1
    c.request_output_lengths[new], c.request_kv_length_offsets[new] = (lengths + outputs).int(), skipped.int()
    counts = (lengths + size - 1) // size
    _set_blocks(c, added, counts)
    c.request_kv_block_counts[new] = counts.int()
    c.request_last_kv_block_id[new] = c.request_to_kv_block_ids[new].gather(1, counts.unsqueeze(1) - 1).squeeze(1)
    c.request_last_kv_block_offset[new] = ((lengths - 1) % size).int()

    rows, positions = expand_counts(lengths - skipped)
    positions += skipped[rows]
    rows += new.start
    tokens = slice(c.active_token_count, c.active_token_count + len(rows))
    c.token_to_pos_ids[tokens] = c.token_to_position_in_request[tokens] = positions
    c.token_to_input_ids[tokens] = torch.cat([one.remaining_prompt_tokens[start:] for one, _, start in added])
    c.token_to_request_idx[tokens] = rows.to(c.token_to_request_idx.dtype)
    c.token_to_block_idx[tokens] = c.request_to_kv_block_ids[rows, positions // size].to(c.token_to_block_idx.dtype)
    c.token_to_local_position_within_kv_block[tokens] = positions % size
    c.active_token_count = tokens.stop
    c.lifetime_prefill_token_count += len(rows)
    c.total_request_count = new.stop
    c.num_prefill_requests += n
    if c.enable_prefix_caching:
        _register(c, added, new.start)
        c.prefix_cache_prefill_computed_tokens += len(rows)
        c.prefix_cache_prefill_skipped_tokens += int(skipped.sum())


def _set_blocks(context, added: list[Fitting], counts: torch.Tensor):
    """Gives new requests their `counts` [n] blocks: first cached ones, then fresh ones."""
    c, blocks = context, context.kv_block_allocator
    start = c.total_request_count
    cached = torch.tensor([len(found) for _, found, _ in added])
    for row, (_, found, _) in enumerate(added, start):
        if found:  # in use before others are emptied
            shared = torch.tensor(found, dtype=c.request_to_kv_block_ids.dtype)
            c.request_to_kv_block_ids[row, : len(shared)] = shared
            blocks.block_ref_counts[shared.long()] += 1
    fresh = counts - cached
    taken = blocks.allocate_memory_blocks(int(fresh.sum()))
    rows, columns = expand_counts(fresh)
    c.request_to_kv_block_ids[start + rows, cached[rows] + columns] = taken


def _register(context, added: list[Fitting], start: int):
    """Registers the whole blocks of new requests, whose first row is `start`, for later ones."""
    c = context
    for row, (request, cached, skipped) in enumerate(added, start):
        c.continue_prefix(request, skipped)
        if cached:
            c.prefix_cache_hits += 1
            c.prefix_cache_blocks_matched += len(cached)
            request.num_cached_tokens += len(cached) * c.block_size_tokens
        hashes = request.precomputed_block_hashes
        fresh = c.request_to_kv_block_ids[row, len(cached) : len(hashes)].tolist()
        c.kv_block_allocator.register_kv_block_hashes(fresh, hashes[len(cached) :])
