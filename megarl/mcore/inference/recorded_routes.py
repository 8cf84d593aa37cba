"""Routes of the text that the engine writes, all of them or an error.

They lie with the blocks of the cache, as the keys do, so that whoever shares a block has its routes, and are taken out
when a request ends, before another one gets its blocks. Megatron's own bookkeeping looks later, finds blocks that are
someone else's by then, says expert 0 where it knows nothing, and gives up on requests that were evicted. Such a request
is read again from its start: its routes are those of the pass that its keys are of.
"""

import torch
import torch.distributed as dist
from megatron.core.inference.contexts.kv_block_allocator import KVBlockAllocator
from megatron.core.inference.contexts.routing_metadata import RoutingMetadata
from megatron.core.transformer.moe.router_replay import RouterReplay
from torch import Tensor

from megarl.mcore.moe.routing import NO_ROUTE


class StepRoutes(RoutingMetadata):
    """What the routers recorded in one step of the engine."""

    def __init__(self, context, layers: tuple[int, ...], topk: int, tensor_ranks: int):
        """`tensor_ranks`: over which sequence parallelism cuts a step's tokens; 1 without it."""
        super().__init__(context, topk)
        self.layers, self.tensor_ranks = layers, tensor_ranks

    def get_routing_indices(self) -> Tensor | None:
        """[R, L, k] int32 of the R tokens of the step, padding included, that this rank's routers saw; None: L is 0.

        Raises:
            RuntimeError: a router recorded nothing, or other rows.
        """
        recorded = RouterReplay.get_recorded_data()
        rows = self.context.padded_active_token_count // self.tensor_ranks
        found = [0 if routes is None else len(routes) for routes in recorded]
        if found != [rows] * len(self.layers):
            raise RuntimeError(
                f"rollout: the engine recorded routes of {found} tokens in MoE layers {list(self.layers)}; "
                f"its step had {rows}"
            )
        RouterReplay.clear_global_indices()  # a router that is left out next time must not answer with these
        return torch.stack(recorded, dim=1).int() if recorded else None  # gloo gathers no int16


class RoutedBlocks(KVBlockAllocator):
    """Megatron's allocator of cache blocks, which keeps the routes of their tokens while `is_recording`."""

    def __init__(self, fresh: KVBlockAllocator, layers: tuple[int, ...], topk: int):
        """Takes the place of a `fresh` allocator of the same size."""
        super().__init__(
            fresh.context, fresh.total_count, fresh.paused_count, fresh.enable_prefix_caching,
            fresh.prefix_caching_eviction_policy,
        )  # fmt: skip
        self.layers, self.topk, self.is_recording = layers, topk, False
        self.routes: Tensor | None = None  # [blocks, block, L, k] int16, on the host
        self.finished: dict[int, Tensor] = {}  # request -> [n, L, k] of those that ended and were not asked for

    def record(self, is_recording: bool):
        """Whether the next requests' routes are kept."""
        self.is_recording = is_recording
        self.finished.clear()
        if is_recording and self.routes is None:
            size = (self.total_count, self.context.block_size_tokens, len(self.layers), self.topk)
            self.routes = torch.empty(size, dtype=torch.int16, device="cpu")

    def allocate_memory_blocks(self, num_blocks: int) -> Tensor | None:
        """[num_blocks] blocks, without keys and routes of whoever had them; None where too few are free.

        Attention reads whole blocks: memory that was something else's may hold what is no number.
        """
        blocks = super().allocate_memory_blocks(num_blocks)
        if blocks is not None and num_blocks:
            self.context.memory_buffer.index_fill_(1, blocks.long(), 0)
            if self.is_recording:
                self.routes[blocks.long()] = NO_ROUTE
        return blocks

    def store_routing_per_block(self, flat_routing):
        """Keeps a step's routes, a numpy array [tokens, L, k]. None: a step without recording, or no MoE layer here."""
        if flat_routing is None:
            return
        c, tokens = self.context, slice(len(flat_routing))
        places = c.token_to_block_idx[tokens].long(), c.token_to_local_position_within_kv_block[tokens].long()
        self.routes[places] = torch.from_numpy(flat_routing)

    def take_out(self, is_active: Tensor):
        """Copies the routes of the requests that end with this step; `is_active` [requests of the step]."""
        if not self.is_recording:
            return
        c = self.context
        for place in ((is_active == 0).nonzero().flatten() + c.paused_request_count).tolist():
            number, blocks = int(c.request_ids[place]), c.request_to_kv_block_ids[place].long()
            if number != c.chunked_prefill_request_id:  # half of a prompt: what was sampled behind it does not count
                tokens = int(c.request_kv_length_offsets[place] + c.request_query_lengths[place])
                self.finished[number] = self.routes[blocks[blocks >= 0]].flatten(0, 1)[:tokens]

    def routes_of(self, number: int, tokens: int) -> Tensor:
        """[tokens, L, k] int16 of a finished request of so many tokens; the last one, which never ran, has no route.

        Raises:
            RuntimeError: a token lacks its route in a layer.
        """
        rows = self.finished.pop(number, torch.zeros(0, len(self.layers), self.topk, dtype=torch.int16))
        known = int((rows >= 0).flatten(1).all(1).sum())
        if (len(rows), known) != (tokens - 1, tokens - 1):
            raise RuntimeError(
                f"rollout: request {number} has routes of {known} tokens in MoE layers {list(self.layers)}, "
                f"{tokens - 1} are wanted"
            )
        return torch.cat([rows, rows.new_full((1, *rows.shape[1:]), NO_ROUTE)])


def attach_routes(context, layers: tuple[int, ...], config, tensor_group):
    """Gives a context that was just made its stores of routes in this rank's MoE layers."""
    ranks = dist.get_world_size(tensor_group) if config.sequence_parallel else 1
    context.kv_block_allocator = RoutedBlocks(context.kv_block_allocator, layers, config.moe_router_topk)
    context.moe_routing_metadata = StepRoutes(context, layers, config.moe_router_topk, ranks)
