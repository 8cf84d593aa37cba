"""Recorded expert choices (routes) of prompts and responses in the engine: complete, or an error.

Routes are stored per cache block, like keys, so requests that share a block share its routes. They are copied out when
a request ends, before another request reuses its blocks. Megatron's own bookkeeping reads them later, after blocks were
reused, fills gaps with expert 0, and drops routes of evicted requests. An evicted request is prefilled again from its
start: its routes come from the pass that computed its keys.
"""

import torch
from megatron.core.inference.contexts.routing_metadata import RoutingMetadata
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from megarl.mcore.inference.reusable_blocks import ReusableBlocks
from megarl.mcore.moe.routes import NO_ROUTE


class StepRoutes(RoutingMetadata):
    """Routes that the routers recorded in one step of the engine."""

    def __init__(self, context, layers: tuple[int, ...], topk: int):
        super().__init__(context, topk)
        self.layers = layers

    def get_routing_indices(self) -> Tensor | None:
        """Returns routes [R, L, k] int32 of the R tokens, padding included, in this rank's routers; None if L is 0.

        Duplicate prompts, which the routers did not see, have the routes of the prompt that was computed.

        Raises:
            RuntimeError: a router recorded nothing, or another number of tokens.
        """
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


class RoutedBlocks(ReusableBlocks):
    """Blocks of the cache; keeps the routes of their tokens while `is_recording`."""

    def __init__(self, fresh, layers: tuple[int, ...], topk: int):
        """Replaces `fresh`, an unused allocator of the same size."""
        super().__init__(fresh)
        self.layers, self.topk = layers, topk
        self.is_recording = False
        self.routes: Tensor | None = None  # [blocks, block, L, k] int16, on the host
        self.finished: dict[int, Tensor] = {}  # request id -> [n, L, k] of ended requests, until `routes_of`

    def record(self, is_recording: bool):
        """Starts or stops keeping the routes of requests, and drops those of ended ones."""
        self.is_recording = is_recording
        self.finished.clear()
        if is_recording and self.routes is None:
            size = (self.total_count, self.context.block_size_tokens, len(self.layers), self.topk)
            self.routes = torch.empty(size, dtype=torch.int16, device="cpu")

    def allocate_memory_blocks(self, num_blocks: int) -> Tensor | None:
        """Returns [num_blocks] blocks, cleared of old keys and routes; None if too few are free.

        Attention reads whole blocks, and reused memory may contain NaN.
        """
        blocks = super().allocate_memory_blocks(num_blocks)
        if blocks is not None and num_blocks:
            for cache in self.context.layer_caches():
                cache.index_fill_(0, blocks.long().to(cache.device), 0)  # the allocator's blocks are the host's
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
        computed, has none.

        Raises:
            RuntimeError: a token has no route in some layer.
        """
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
    context.kv_block_allocator = RoutedBlocks(context.kv_block_allocator, layers, topk)
    context.moe_routing_metadata = StepRoutes(context, layers, topk)
