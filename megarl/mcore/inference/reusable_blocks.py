"""Blocks of the cache that outlive their request, and the routes of their tokens: complete, or an error.

Megatron registers a prompt's whole blocks when it is prefilled. Here those that decode steps filled are registered too,
when their request leaves the cache: the next turn of an episode reads only what is new. A decode step computes the same
bits as a prefill. The token that was drawn last has no keys, so a block that would hold it is not whole. Of blocks that
no request uses, those go first whose last request left first, and of one request its last ones.

Routes are stored per block, like keys, so requests that share a block share its routes. They are copied out when a
request ends, before another one reuses its blocks. Megatron's own bookkeeping reads them later, fills gaps with expert
0, and drops routes of evicted requests. Those have the routes of the pass that computed their keys again.
"""

import torch
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator
from megatron.core.inference.contexts.routing_metadata import RoutingMetadata
from megatron.core.inference.inference_request import compute_block_hashes_batched
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from megarl.mcore.moe.routes import NO_ROUTE


class StepRoutes(RoutingMetadata):
    """Routes that the routers recorded in one step of the engine."""

    def __init__(self, context, layers: tuple[int, ...], topk: int):
        super().__init__(context, topk)
        self.layers = layers

    def get_routing_indices(self) -> Tensor | None:
        """Returns routes [R, L, k] int32 of the R tokens, padding included, in this rank's routers; None if L is 0.
        Duplicate prompts, which the routers did not see, have the routes of the prompt that was computed. RuntimeError:
        a router recorded nothing, or another number of tokens."""
        recorded = RouterReplay.get_recorded_data()
        dedup, rows = self.context.dedup, self.context.padded_active_token_count // self.context.tensor_ranks
        rows = rows if dedup is None else len(dedup.kept_tokens)
        counts = [0 if routes is None else len(routes) for routes in recorded]
        if counts != [rows] * len(self.layers):
            raise RuntimeError(
                f"rollout: the engine recorded routes of {counts} tokens in MoE layers {list(self.layers)}; "
                f"its step had {rows}"
            )
        RouterReplay.clear_global_indices()  # a router that is skipped in the next step must not return these
        if not recorded:
            return None
        routes = torch.stack(recorded, dim=1).int()  # gloo cannot gather int16
        return routes if dedup is None else routes.index_select(0, dedup.inverse)


class ReusableBlocks(KVBlockAllocator):
    """Megatron's allocator of cache blocks; it keeps them after their requests, and routes while `is_recording`."""

    def __init__(self, fresh: KVBlockAllocator, layers: tuple[int, ...], topk: int):
        """Replaces `fresh`, an unused allocator of the same size. `layers`: this rank's MoE layers."""
        policy = fresh.prefix_caching_eviction_policy
        super().__init__(fresh.context, fresh.total_count, fresh.paused_count, fresh.enable_prefix_caching, policy)
        self._clock, self.layers, self.topk = 0, layers, topk
        self.is_recording = False
        self.routes: Tensor | None = None  # [blocks, block, L, k] int16, on the host
        self.finished: dict[int, Tensor] = {}  # request id -> [n, L, k] of ended requests, until `routes_of`

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
        """Registers the whole blocks of requests that leave, by their rows. RuntimeError: a sequence is too short."""
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

    def record(self, is_recording: bool):
        """Starts or stops keeping the routes of requests, and drops those of ended ones."""
        self.is_recording = is_recording
        self.finished.clear()
        if is_recording and self.routes is None:
            size = (self.total_count, self.context.block_size_tokens, len(self.layers), self.topk)
            self.routes = torch.empty(size, dtype=torch.int16, device="cpu")

    def allocate_memory_blocks(self, num_blocks: int) -> Tensor | None:
        """Returns [num_blocks] blocks, cleared of old keys and routes; None if too few are free. Attention reads whole
        blocks, and reused memory may contain NaN."""
        blocks = super().allocate_memory_blocks(num_blocks)
        if blocks is not None and num_blocks:
            caches, rows = self.context.layer_caches(), blocks.long()
            rows = rows.to(caches[0].device) if caches else rows  # once: the allocator's blocks are the host's
            for cache in caches:
                cache.index_fill_(0, rows, 0)
            if self.is_recording:
                self.routes[blocks.long()] = NO_ROUTE
        return blocks

    def store_routing_per_block(self, flat_routing):
        """Stores a step's routes, a numpy array [tokens, L, k]; None: not recording, or no MoE layer on this rank."""
        if flat_routing is None:
            return
        c, tokens = self.context, slice(len(flat_routing))
        slots = c.token_to_block_idx[tokens].long(), c.token_to_local_position_within_kv_block[tokens].long()
        self.routes[slots] = torch.from_numpy(flat_routing)

    def copy_routes(self, source: Tensor, target: Tensor):
        """Copies the routes of tokens to others; both are slots [n] of the flattened cache."""
        if self.is_recording:
            routes = self.routes.flatten(0, 1)
            routes[target] = routes[source]

    def save_finished(self, is_active: Tensor):
        """Copies the routes of requests that end with this step; `is_active`: [requests of the step], 0 if ended."""
        if not self.is_recording:
            return
        c = self.context
        for row in ((is_active == 0).nonzero().flatten() + c.paused_request_count).tolist():
            request_id, blocks = int(c.request_ids[row]), c.request_to_kv_block_ids[row].long()
            if request_id != c.chunked_prefill_request_id:  # a partial prefill: its sampled token is discarded
                tokens = int(c.request_kv_length_offsets[row] + c.request_query_lengths[row])
                self.finished[request_id] = self.routes[blocks[blocks >= 0]].flatten(0, 1)[:tokens]

    def routes_of(self, request_id: int, tokens: int) -> Tensor:
        """Returns routes [tokens, L, k] int16 of a finished request of that length; the last token, which was never
        computed, has none. RuntimeError: a token has no route in some layer."""
        rows = self.finished.pop(request_id, torch.zeros(0, len(self.layers), self.topk, dtype=torch.int16))
        known = int((rows >= 0).flatten(1).all(1).sum())
        if (len(rows), known) != (tokens - 1, tokens - 1):
            raise RuntimeError(
                f"rollout: request {request_id} has routes of {known} tokens in MoE layers {list(self.layers)}, "
                f"{tokens - 1} are expected"
            )
        return torch.cat([rows, rows.new_full((1, *rows.shape[1:]), NO_ROUTE)])


def attach_routes(context, layers: tuple[int, ...], topk: int):
    """Replaces the allocator and routing metadata of a new context, to record routes in this rank's MoE layers."""
    context.kv_block_allocator = ReusableBlocks(context.kv_block_allocator, layers, topk)
    context.moe_routing_metadata = StepRoutes(context, layers, topk)
