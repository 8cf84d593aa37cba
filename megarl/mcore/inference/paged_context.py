"""What a step of the rollout engine is about: its requests, their cache, which logits are wanted of it."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.attention.paged_attention import (
    CacheReads,
    PagedAttention,
    PrefillDedup,
    deduplicate_prefills,
    plan_cache_reads,
)
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.model.decoder_layer import Rotation, StepPlan


class PagedContext(DynamicInferenceContext):
    """Megatron's context; on a CPU a decode step is not rounded up to 64 tokens, which costs more than it saves."""

    TOKEN_ROUNDER = DynamicInferenceContext.TOKEN_ROUNDER if device.has_cuda() else MIN_ROWS

    def __init__(self, model_config, inference_config, memory: Callable[[int], Tensor] | None = None):
        """`memory`: gives so many bytes for the cache, whatever they hold; None: the cache has its own."""
        self._memory = memory
        self._plan: StepPlan | None = None
        self.goes_on = False  # the next step is the last one's requests with one more token each
        self._frequencies: Tensor | None = None
        self._rotation: Rotation | None = None
        self._attend = PagedAttention()
        super().__init__(model_config, inference_config)
        self._is_coupled = dist.get_world_size(inference_config.pg_collection.ep) > 1
        # Where layers count on the rows that the step says, twins are read one by one.
        self._may_share = not model_config.sequence_parallel and model_config.num_moe_experts is None

    def _allocate_memory_buffer(self):
        """[L, blocks, tokens of a block, G, 2, D]: a token's key and value lie together and are read together."""
        shape = (
            self.num_attention_layers, self.kv_block_allocator.total_count, self.block_size_tokens,
            self.num_attention_heads_per_partition, 2, self.hidden_size_per_attention_head,
        )  # fmt: skip
        size, kind = math.prod(shape) * self.params_dtype.itemsize, {"dtype": torch.uint8, "device": device.device()}
        memory = torch.empty(size, **kind) if self._memory is None else self._memory(size)
        self.memory_buffer = memory.view(self.params_dtype).view(shape)

    def initialize_attention_state(self, **kwargs):
        """Begins a step, whose layers share a plan of their own."""
        goes_on = self.goes_on and self.num_prefill_requests == 0
        self._plan, self.goes_on = None, False
        if goes_on:
            return self.transfer_bookkeeping_to_gpu()
        return super().initialize_attention_state(**kwargs)

    def plan(self, frequencies: Tensor | None) -> StepPlan:
        """The step's plan, made for its first layer; `frequencies` [P, 1, 1, r] of rotary positions, None: without."""
        if self._plan is None:
            tokens = slice(self.padded_active_token_count)
            view = self.gpu_view
            places = view.token_to_block_idx[tokens].long() * self.block_size_tokens
            places += view.token_to_local_position_within_kv_block[tokens]
            dedup, reads = self._reads()
            dedup = dedup and PrefillDedup(*(x.to(places.device) for x in dedup))
            positions, rotation = view.token_to_position_in_request[tokens].long(), self._rotation_of(frequencies)
            self._plan = StepPlan(
                places,
                dedup,
                rotation and rotation.at(positions if dedup is None else positions[dedup.kept]),
                reads,
                self.memory_buffer.unbind(),
                self._attend,
            )
        return self._plan

    def _rotation_of(self, frequencies: Tensor | None) -> Rotation | None:
        """Of all positions: computed once."""
        if frequencies is not self._frequencies:
            self._frequencies, self._rotation = frequencies, Rotation.of(frequencies, self.params_dtype)
        return self._rotation

    def _reads(self) -> tuple[PrefillDedup | None, CacheReads]:
        active = slice(self.paused_request_count, self.total_request_count)
        queries = self.request_query_lengths[active].long()
        keys = self.request_kv_length_offsets[active] + queries
        pages = self.request_to_kv_block_ids[active].long()
        spare, total = self.kv_block_allocator.dummy_block_idx, self.padded_active_token_count
        pages.masked_fill_(pages < 0, spare)
        if self.is_decode_only() and total > len(queries):  # padding tokens read what they wrote themselves
            missing = total - len(queries)
            queries = torch.cat([queries, queries.new_ones(missing)])
            keys = torch.cat([keys, keys.new_ones(missing)])
            pages = torch.cat([pages, pages.new_full((missing, pages.shape[1]), spare)])
        may_share = self._may_share and self.num_prefill_requests > 1
        dedup = deduplicate_prefills(self.token_to_input_ids[:total], queries, keys) if may_share else None
        if dedup is not None:
            queries, keys, pages = (x[dedup.requests] for x in (queries, keys, pages))
            total = len(dedup.kept)
        return dedup, plan_cache_reads(queries, keys, pages, total, self.memory_buffer[0])

    def reset(self, *args, **kwargs):
        """Forgets all requests. The spare block holds numbers from here on: padding reads it."""
        self.goes_on = False
        super().reset(*args, **kwargs)
        self.memory_buffer[:, self.kv_block_allocator.dummy_block_idx].zero_()

    @property
    def num_last_token_logits(self) -> int:
        """Rows of `last_token_logits`: pipeline stages agree on it before they pass logits on."""
        return max(super().num_last_token_logits, MIN_ROWS)

    def last_token_logits(self, logits: Tensor) -> Tensor:
        """Hidden states [1, S, H] -> those of each request's last token [≥ N, H], never fewer rows than training."""
        rows = logits.squeeze(0)[self.active_logit_idxs[: super().num_last_token_logits]]
        return torch.cat([rows, rows[:1].expand(MIN_ROWS - len(rows), -1)]) if len(rows) < MIN_ROWS else rows

    def calculate_log_probs(self, logits, new_tokens, only_last_token_logits=False, sampling=None):
        """The log-probs of the tokens that `sampling` just drew, a list of one for each request."""
        return [[logprob] for logprob in sampling.log_probs(new_tokens).tolist()], None

    def update_requests(self, active_requests_mask: Tensor, new_tokens: Tensor, *args, **kwargs):
        """Moves on to the next step; blocks of requests that ended may be others' behind it.

        Most steps only give each request one more token. Megarl moves on from these itself: Megatron's way, made for
        requests that come, go and wait, takes as long as a small layer.
        """
        self.goes_on = self._is_simple and bool(active_requests_mask.all()) and self._advance(new_tokens)
        if self.goes_on:
            return {"newly_paused_request_ids": None, "evict_request_ids": None}
        self.kv_block_allocator.take_out(active_requests_mask)
        return super().update_requests(active_requests_mask, new_tokens, *args, **kwargs)

    def go_on(self, new_tokens: Tensor) -> bool:
        """Moves on from a step that `goes_on`; False, and nothing: a request ends with its new token, or no block is
        left."""
        inside = slice(self.total_request_count)
        lengths = self.request_kv_length_offsets[inside] + self.request_query_lengths[inside] + 1
        ends = new_tokens == self.active_request_metadata["termination_id"][inside]
        ends |= lengths >= self.request_output_lengths[inside]
        self.goes_on = not ends.any() and self._advance(new_tokens)
        return self.goes_on

    @property
    def _is_simple(self) -> bool:
        """Whether the step decoded one token of each request, none of which waits, shares blocks, or has its next
        steps agreed on with other lanes."""
        waits = self.paused_request_count or self.chunked_prefill_request_id != -1
        shares = self.kv_block_allocator.enable_prefix_caching or self._is_coupled
        return self.num_prefill_requests == 0 and not waits and not shares

    def _advance(self, new_tokens: Tensor) -> bool:
        """Gives each request its new token, and a block where its last is full; False, and nothing: none are left."""
        inside, blocks = slice(self.total_request_count), self.kv_block_allocator
        offsets = self.request_last_kv_block_offset[inside]
        full = (offsets == self.block_size_tokens - 1).nonzero().flatten()
        if len(full):
            if min(blocks.get_active_avail(), blocks.total_avail) < len(full):
                return False
            fresh = blocks.allocate_memory_blocks(len(full))
            self.request_to_kv_block_ids[full, self.request_kv_block_counts[full].long()] = fresh
            self.request_kv_block_counts[full] += 1
            self.request_last_kv_block_id[full], self.token_to_block_idx[full] = fresh, fresh.long()
            offsets[full] = -1
        offsets += 1
        self.token_to_local_position_within_kv_block[inside] = offsets
        for positions in (self.request_kv_length_offsets, self.token_to_pos_ids, self.token_to_position_in_request):
            positions[inside] += 1
        self.token_to_input_ids[inside] = new_tokens
        return True
