"""Blocks of the cache that outlive their request: later requests whose prompts begin with the same tokens find them.

Megatron registers a prompt's whole blocks when it is prefilled. Here those that decode steps filled are registered too,
when their request leaves the cache: the next turn of an episode, whose prompt is the last prompt, the written tokens
and more, reads only what is new. A decode step computes the same bits as a prefill, so nothing else changes. The token
that was drawn last has no keys, and a block that would hold it is not whole, so neither is found again.

A block is registered under a hash of all tokens up to its end. Blocks that no request uses stay until room is needed;
then those go first whose last request left first, and of one request its last blocks, since a block can be found only
with all blocks before it.
"""

from typing import NamedTuple

import torch
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator
from megatron.core.inference.inference_request import compute_block_hashes_batched
from torch import Tensor


class PrefillCounts(NamedTuple):
    """Tokens of prompts: those that were read, and those whose blocks were found in the cache. Equal prompts of one
    step, which are computed once, count each. So do tokens of a response that are read again because its request was
    evicted."""

    read: int = 0
    reused: int = 0

    def plus(self, other: "PrefillCounts") -> "PrefillCounts":
        """Returns the sum of both counts."""
        return PrefillCounts(self.read + other.read, self.reused + other.reused)


class ReusableBlocks(KVBlockAllocator):
    """Megatron's allocator of cache blocks; with prefix caching, it keeps blocks after their requests."""

    def __init__(self, fresh: KVBlockAllocator):
        """Replaces `fresh`, an unused allocator of the same size."""
        super().__init__(
            fresh.context,
            fresh.total_count,
            fresh.paused_count,
            fresh.enable_prefix_caching,
            fresh.prefix_caching_eviction_policy,
        )
        self._clock = 0

    def reset(self):
        super().reset()
        self._clock = 0

    @property
    def available(self) -> int:
        """Blocks that hold nothing or that no request uses."""
        return self.total_avail + (int(self.get_evictable_block_count()) if self.enable_prefix_caching else 0)

    def can_take(self, count: int) -> bool:
        """Whether the requests of the step may have `count` more blocks."""
        if not self.is_memory_available(count):
            return False
        c = self.context
        # Requests that share blocks use fewer than this sum; counting them takes longer.
        used = int(c.request_kv_block_counts[c.paused_request_count : c.total_request_count].sum())
        return self.active_count - used >= count or self.get_active_avail() >= count

    def make_room(self, count: int):
        """Empties blocks that no request uses, until `count` are free or none is left."""
        if self.enable_prefix_caching and self.total_avail < count:
            self.evict_lru_blocks(min(count - self.total_avail, int(self.get_evictable_block_count())))

    def evict_lru_blocks(self, num_blocks_needed: int) -> bool:
        """Empties that many blocks that no request uses, the oldest; returns False, changing nothing, for too few."""
        unused = ((self.block_ref_counts == 0) & (self.block_hashes != -1)).nonzero().flatten()
        if len(unused) < num_blocks_needed:
            return False
        oldest = self.block_timestamps[unused].argsort()[:num_blocks_needed]
        self._deregister_blocks(unused[oldest])
        return True

    def update_timestamps(self, block_ids: Tensor):
        """Does nothing: blocks get their time when a request leaves them, and before that they are not emptied."""

    def release_memory_blocks(self, blocks: Tensor):
        """Returns blocks that requests leave; `blocks`: those of each request in the order of its tokens."""
        if self.enable_prefix_caching and len(blocks):
            times = torch.arange(self._clock + len(blocks), self._clock, -1)
            self.block_timestamps.scatter_reduce_(0, blocks.long(), times, "amax")
            self._clock += len(blocks)
        super().release_memory_blocks(blocks)

    def register_kv_block_hashes(self, block_ids: list[int], block_hashes: list[int], parent_hashes=None):
        """Makes blocks known under their hashes, but one of another block with the same tokens stays as it is."""
        known = self.kv_hash_to_block_id
        new = {value: block for block, value in zip(block_ids, block_hashes, strict=True) if value not in known}
        if new:
            known.update(new)
            self.block_hashes[list(new.values())] = torch.tensor(list(new))

    def register_sequences(self, rows: Tensor):
        """Registers the whole blocks of requests that leave the cache; `rows`: their rows in the context. RuntimeError:
        a request's sequence is shorter than its keys."""
        if not self.enable_prefix_caching:
            return
        c, size = self.context, self.context.block_size_tokens
        for row in rows.tolist():
            count = int(c.request_kv_length_offsets[row] + c.request_query_lengths[row]) // size
            blocks = c.request_to_kv_block_ids[row, :count]
            is_new = self.block_hashes[blocks.long()] == -1
            if not is_new.any():
                continue
            request = c.request_of(int(c.request_ids[row]))
            sequence = [*request.prompt_tokens.tolist(), *request.generated_tokens]  # without the token drawn last
            if len(sequence) < count * size:
                raise RuntimeError(f"the cache has {count} blocks of {size} tokens for a sequence of {len(sequence)}")
            hashes = compute_block_hashes_batched(torch.tensor(sequence[: count * size]), size)
            chosen = is_new.nonzero().flatten().tolist()
            self.register_kv_block_hashes(blocks[chosen].tolist(), [hashes[i] for i in chosen])
