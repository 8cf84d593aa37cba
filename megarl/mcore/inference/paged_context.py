"""State of the rollout engine between and within steps: its requests, their KV cache, and the step's plan."""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.attention import backends
from megarl.mcore.attention.cache_attention import PrefillDedup, StepRequests, deduplicate_prefills
from megarl.mcore.attention.rotary_embeddings import Rotation
from megarl.mcore.attention.segments import window_of
from megarl.mcore.inference.cache_size import latent_widths, one_stage
from megarl.mcore.inference.draft_rows import DraftRows
from megarl.mcore.kernels.batch_invariance import MIN_ROWS
from megarl.mcore.model.decoder_layer import StepPlan
from megarl.mcore.model.pipeline_layout import indexer_pattern, layers_of_chunk
from megarl.mcore.vision.store import ImageStore, RequestPositions

if TYPE_CHECKING:
    from megarl.mcore.inference.device_decode import DeviceStep


class PagedContext(DynamicInferenceContext):
    """Megatron's dynamic context with megarl's cache layout, step plans and a fast path for decode steps."""

    # On a CPU, rounding a decode step up to 64 tokens costs more than it saves.
    TOKEN_ROUNDER = DynamicInferenceContext.TOKEN_ROUNDER if device.has_cuda() else MIN_ROWS

    def __init__(
        self, model_config, inference_config, memory: Callable[[int], Tensor] | None = None, further_layers: int = 0
    ):
        """`memory`: returns the given number of uninitialized bytes for the cache; None: allocate them.
        `further_layers`: with keys and values, after those of the model."""
        self._memory, self._further_layers = memory, further_layers
        self.hidden: tuple[Tensor, Tensor | None] | None = None  # as of `keep_hidden`, of the last step
        self.hidden_step: DeviceStep | None = None  # that step, if the device planned it
        self.after_prefill: Callable[[Tensor], None] | None = None  # takes the tokens of a step that is Megatron's
        self._plan: StepPlan | None = None
        self.only_decodes = False  # the next step decodes one more token of each request
        self._is_prepared = False  # Megatron's tensors of a step are those of a decode step of these requests
        self.request_of: Callable[[int], Any] | None = None  # id of a request in the engine -> Megatron's request
        self.draft_rows: DraftRows | None = None  # of a step that also reads drafted tokens
        self._read_before = self.lifetime_prefill_token_count = 0
        self._frequencies: Tensor | None = None
        self._rotations: list[Rotation] = []  # of all positions: one, or two if layers with a window have another
        self._images: ImageStore | None = None
        self.image_positions: RequestPositions | None = None  # if images have positions in three axes
        self._model_config = model_config
        self._backend = backends.load(model_config)
        self._attend, self._window = self._backend.PagedAttention(), window_of(model_config)
        self._token_bytes: int | None = None  # of a token's keys and values when they are read; None: as in the cache
        super().__init__(self._cache_config(model_config), inference_config)
        self._tensor_group = inference_config.pg_collection.tp
        self._device_step: DeviceStep | None = None  # the step, if the device plans it
        # Sequence parallelism needs the step's full number of rows, so duplicate prompts are not skipped.
        self._may_share = not model_config.sequence_parallel

    def _cache_config(self, model_config):
        """Returns the config from which Megatron computes the size of a block."""
        if not self._further_layers:
            return model_config
        config = copy.copy(model_config)
        config.num_layers += self._further_layers
        return config

    def _allocate_memory_buffer(self):
        """Allocates [L, blocks, block size, G, 2, D]: a token's key and value are adjacent because reads need both."""
        shape = (
            self.num_attention_layers,
            self.kv_block_allocator.total_count,
            self.block_size_tokens,
            self.num_attention_heads_per_partition,
            2,
            self.hidden_size_per_attention_head,
        )
        size, kind = math.prod(shape) * self.params_dtype.itemsize, {"dtype": torch.uint8, "device": device.device()}
        memory = torch.empty(size, **kind) if self._memory is None else self._memory(size)
        self.memory_buffer = memory.view(self.params_dtype).view(shape)

    def initialize_attention_state(self, **kwargs):
        """Begins a step and discards the plan of the last one."""
        is_prepared = self.is_prepared
        self._plan, self.only_decodes, self._is_prepared = None, False, self.num_prefill_requests == 0
        if is_prepared:
            return self.transfer_bookkeeping_to_gpu()
        super().initialize_attention_state(**kwargs)
        if self._images is not None:  # rows of padding may have ids of images that are gone
            for tokens in (self.token_to_input_ids, self.gpu_view.token_to_input_ids):
                tokens[self.active_token_count : self.padded_active_token_count] = 0

    def read_images(self, store: ImageStore | None):
        """Begins a session, in which images of requests are taken from a store; None: requests have none."""
        self._images = store
        self.image_positions = None if store is None or store.axes is None else RequestPositions(store)

    def keep_hidden(self, hidden: Tensor, frequencies: Tensor | None):
        """Keeps a step's hidden states [T, 1, H] after the final norm, and its frequencies, for drafts from them."""
        if self.after_prefill is not None:
            self.hidden, self.hidden_step = (hidden, frequencies), self._device_step

    @property
    def hidden_rows(self) -> int:
        """Rows of the step whose hidden states are kept, with padding."""
        return self.padded_active_token_count if self.hidden_step is None else self.hidden_step.rows

    def plan(self, frequencies: Tensor | None) -> StepPlan:
        """Returns the step's plan, built at its first layer; `frequencies`: rotary ones, of all positions, or None."""
        if self._plan is None:
            step = self._device_step
            self._plan = self._host_plan(frequencies) if step is None else self._device_plan(step, frequencies)
        return self._plan

    def _host_plan(self, frequencies: Tensor | None) -> StepPlan:
        tokens, view = slice(self.padded_active_token_count), self.gpu_view
        slot_mapping = view.token_to_block_idx[tokens].long() * self.block_size_tokens
        slot_mapping += view.token_to_local_position_within_kv_block[tokens]
        dedup, reads = self._reads()
        states = self._states_of_step(len(slot_mapping), dedup)
        dedup = dedup and PrefillDedup(*(x.to(slot_mapping.device) for x in dedup))
        positions = view.token_to_position_in_request[tokens].long()
        if self._images is not None:
            ids = view.token_to_input_ids[tokens]
            states["images"] = self._images.feature_rows(ids if dedup is None else ids[dedup.kept_tokens])
        if self.image_positions is not None:
            positions = self.image_positions.at(positions.cpu(), self._requests_of_rows()).to(positions.device)
        positions = positions if dedup is None else positions[..., dedup.kept_tokens]
        rotations = self._rotations_at(positions, frequencies)
        return StepPlan(slot_mapping, dedup, rotations, reads, self.layer_caches(), self._attend, **states)

    def _requests_of_rows(self) -> Tensor:
        """[T] int64 id of the request of each row of the step; −1: padding."""
        ids, counts = self.request_ids[self.of_step].long(), self.request_query_lengths[self.of_step].long()
        rows = ids.repeat_interleave(counts) if self.draft_rows is None else ids[self.draft_rows.requests]
        return torch.nn.functional.pad(rows, (0, self.padded_active_token_count - len(rows)), value=-1)

    def layer_caches(self) -> tuple[Tensor, ...]:
        """The cache of each layer of this rank."""
        return self.memory_buffer.unbind()

    def _states_of_step(self, rows: int, dedup: PrefillDedup | None) -> dict:
        """Fields of a step's plan about recurrent states, in models that have them. `dedup`: on the host."""
        return {}

    def keep_states(self, counts: Tensor):
        """Takes the first `counts` [n] rows of each request, in a step with drafts, into its recurrent states."""

    @property
    def of_step(self) -> slice:
        """Rows of the requests that take part in the step; those before them wait."""
        return slice(self.paused_request_count, self.total_request_count)

    @property
    def reads_tables(self) -> bool:
        """Whether the attention backend takes a decode step's cache blocks as a table on the device."""
        return hasattr(self._backend, "reads_of_table") and self._token_bytes is None

    drafts_on_device = True  # the device can plan steps with drafts, too

    @property
    def tensor_ranks(self) -> int:
        """Ranks that split the tokens of a step between them; 1 without sequence parallelism."""
        return dist.get_world_size(self._tensor_group) if self._model_config.sequence_parallel else 1

    @contextlib.contextmanager
    def use_device_plan(self, step: "DeviceStep") -> Iterator[None]:
        """Context of a decode step that the device plans."""
        padded = self.padded_active_token_count
        self.padded_active_token_count: int = step.rows
        self._plan, self._device_step = None, step
        self.only_decodes = False
        try:
            yield
        finally:
            self._plan = self._device_step = None
            self.padded_active_token_count = padded

    def _device_plan(self, step: "DeviceStep", frequencies: Tensor | None) -> StepPlan:
        windows = (None,) if self._window is None else (None, self._window)
        by_kind = [self._backend.reads_of_table(step.blocks, step.lengths, window, step.arrived) for window in windows]
        positions = step.positions if self.image_positions is None else step.positions + step.shifts
        reads, rotations = (by_kind[0], by_kind[-1]), self._rotations_at(positions, frequencies)
        return StepPlan(step.slots, None, rotations, reads, self.layer_caches(), self._attend, is_on_device=True)

    def recorded_routes(self) -> Tensor | None:
        """[T, L, k] int32 routes of a step's tokens, padding included; None: not recorded, or no MoE layer here."""
        if not self._model_config.moe_enable_routing_replay:
            return None
        routes = self.moe_routing_metadata.get_routing_indices()
        if routes is None or self.tensor_ranks == 1:
            return routes
        return gather_from_sequence_parallel_region(routes, group=self._tensor_group)

    @property
    def dedup(self) -> PrefillDedup | None:
        """Duplicate prompts of the step; None: none, or its plan is not built yet."""
        return None if self._plan is None else self._plan.dedup

    def _rotations_at(self, positions: Tensor, frequencies: Tensor | None) -> tuple[Rotation, Rotation] | None:
        """Returns the rotations of some tokens [T], by kind of layer; None without rotary embeddings."""
        if frequencies is None:
            return None
        # Computed once for all positions: Megatron makes frequencies of other lengths, and forgets the old ones.
        if self._frequencies is None or len(frequencies) > len(self._frequencies):
            self._frequencies = frequencies
            self._rotations = Rotation.by_kind(frequencies, self._model_config, self.params_dtype)
        axes = None if self._images is None else self._images.axes
        rotations = [rotation.at(positions, axes) for rotation in self._rotations]
        return rotations[0], rotations[-1]

    def _reads(self) -> tuple[PrefillDedup | None, tuple]:
        """Plans which keys each token of the step reads, without duplicate prompts, in layers of each kind."""
        active = self.of_step
        queries = self.request_query_lengths[active].long()
        keys = self.request_kv_length_offsets[active] + queries
        pages = self.request_to_kv_block_ids[active].long()
        if self.draft_rows is not None:  # each row reads like a request of its own
            queries, keys = torch.ones_like(self.draft_rows.requests), self.draft_rows.positions + 1
            pages = pages[self.draft_rows.requests]
        spare, total = self.kv_block_allocator.dummy_block_idx, self.padded_active_token_count
        pages.masked_fill_(pages < 0, spare)
        if self.is_decode_only() and total > len(queries):  # padding tokens read only their own keys
            padding = total - len(queries)
            queries = torch.cat([queries, queries.new_ones(padding)])
            keys = torch.cat([keys, keys.new_ones(padding)])
            pages = torch.cat([pages, pages.new_full((padding, pages.shape[1]), spare)])
        may_share = self._may_share and self.num_prefill_requests > 1
        dedup = deduplicate_prefills(self.token_to_input_ids[:total], queries, keys) if may_share else None
        if dedup is not None:
            queries, keys, pages = (x[dedup.requests] for x in (queries, keys, pages))
            total = len(dedup.kept_tokens)
        step = StepRequests(queries, keys, pages, total, self.memory_buffer[0], None, self._token_bytes)
        reads = self._backend.plan_cache_reads(step)
        if self._window is None or int(keys.max()) <= self._window:
            return dedup, (reads, reads)
        return dedup, (reads, self._backend.plan_cache_reads(step._replace(window=self._window)))

    @property
    def read_tokens(self) -> int:
        """Tokens of prompts that were read so far, as `EngineCounts.read`."""
        return self._read_before + self.lifetime_prefill_token_count

    def reset(self, preserve_prefix_cache: bool = False, *, preserve_counters: bool = False):
        """Drops all requests and zeroes the spare block, because padding reads it and must find finite numbers."""
        self.only_decodes = False
        if not preserve_counters:
            self._read_before += self.lifetime_prefill_token_count
        super().reset(preserve_prefix_cache, preserve_counters=preserve_counters)
        for cache in self.layer_caches():
            cache[self.kv_block_allocator.dummy_block_idx].zero_()

    @property
    def num_last_token_logits(self) -> int:
        """Number of rows of `last_token_logits`; pipeline stages need it before they exchange logits."""
        rows = super().num_last_token_logits if self.draft_rows is None else len(self.draft_rows.requests)
        return max(rows, MIN_ROWS)

    def last_token_logits(self, logits: Tensor) -> Tensor:
        """Hidden states [1, S, H] -> those of each request's last token [≥ N, H], padded to the rows of training."""
        if self._device_step is not None:
            return logits.squeeze(0)
        is_last = self.active_logit_idxs[: super().num_last_token_logits]
        rows = logits.squeeze(0)[is_last if self.draft_rows is None else slice(len(self.draft_rows.requests))]
        return torch.cat([rows, rows[:1].expand(MIN_ROWS - len(rows), -1)]) if len(rows) < MIN_ROWS else rows

    def sampled_rows(self) -> tuple[Tensor, Tensor]:
        """Returns ([n] request ids, [n] positions) of the tokens that the step samples; n ≥ N with drafted tokens."""
        if self.draft_rows is not None:
            return self.request_ids[self.draft_rows.owners], self.draft_rows.owner_positions + 1
        active = self.of_step
        return self.request_ids[active], self.request_kv_length_offsets[active] + self.request_query_lengths[active]

    def calculate_log_probs(self, logits, new_tokens, only_last_token_logits=False, sampling=None):
        """Returns the log-probs of the tokens that `sampling` just sampled, as a list of one per request."""
        return [[logprob] for logprob in sampling.log_probs(new_tokens).tolist()], None

    def update_requests(self, active_requests_mask: Tensor, new_tokens: Tensor, new_speculative_tokens=None):
        """Advances to the next step; blocks of finished requests may be reused afterwards. Megarl itself advances
        requests that only decoded one token each: Megatron's version takes as long as a small layer."""
        if self.after_prefill is not None:
            self.after_prefill(new_tokens)
        self.only_decodes = self._is_simple and bool(active_requests_mask.all()) and self._advance(new_tokens)
        if self.only_decodes:
            return {"newly_paused_request_ids": None, "evict_request_ids": None}
        self.kv_block_allocator.save_finished(active_requests_mask)
        found = super().update_requests(active_requests_mask, new_tokens, new_speculative_tokens)
        self.only_decodes, self._is_prepared = self.total_request_count > 0 and self._is_simple, False
        return found

    def release_memory_blocks_from_request_indexes(self, request_indexes: Tensor):
        """Releases the blocks of requests that ended or are evicted; later requests may find them."""
        self.kv_block_allocator.register_sequences(request_indexes)
        super().release_memory_blocks_from_request_indexes(request_indexes)

    def resume_paused_requests(self, active_request_count: int, newly_paused_request_ids):
        """As Megatron's, but takes only free blocks for the requests that continue."""
        self.kv_block_allocator.make_room(self.paused_request_count)
        return super().resume_paused_requests(active_request_count, newly_paused_request_ids)

    def _find_kv_match_count(self, req, start_block: int, end_block: int) -> tuple[list[int], int]:
        """Returns the cached blocks of a prompt from `start_block` on, and the hash of the last one. Unlike for
        Megatron, those before a cached block need not be cached: two requests may have computed some of them twice."""
        known, hashes = self.kv_block_allocator.kv_hash_to_block_id, req.precomputed_block_hashes[start_block:end_block]
        found = list(itertools.takewhile(lambda block: block is not None, map(known.get, hashes)))
        return found, hashes[len(found) - 1] if found else 0

    def hashes_to_find(self, request) -> list[int]:
        """Hashes of a prompt's blocks that may be in the cache already."""
        return request.precomputed_block_hashes

    def hashes_to_keep(self, request, found: int) -> list[int]:
        """Hashes of the blocks that later requests find once the prompt is read, without the first `found` ones."""
        return request.precomputed_block_hashes[found:]

    def continue_prefix(self, request, skipped: int):
        """Prepares a new request whose first tokens, of blocks in the cache, are skipped."""

    def advance_decode(self, new_tokens: Tensor) -> bool:
        """Advances from a step that `only_decodes`; False, changing nothing: a request ends, or blocks are lacking."""
        active = slice(self.total_request_count)
        request_ids, positions = self.sampled_rows()
        ends = self.end_tokens.contains(new_tokens, request_ids, positions)
        ends |= positions + 1 >= self.request_output_lengths[active]
        self.only_decodes = not ends.any() and self._advance(new_tokens)
        return self.only_decodes

    def goes_on_in_place(self) -> bool:
        """Whether all requests of a decode step go on within their last blocks unless one draws an end token, and no
        tensor-parallel rank takes part in steps."""
        active = slice(self.total_request_count)
        lengths = self.request_kv_length_offsets[active] + self.request_query_lengths[active] + 1
        goes_on = lengths < self.request_output_lengths[active]
        goes_on &= self.request_last_kv_block_offset[active] < self.block_size_tokens - 1
        return dist.get_world_size(self._tensor_group) == 1 and bool(goes_on.all())

    @property
    def is_prepared(self) -> bool:
        """Whether the next step decodes one more token of each request of the last step."""
        return self.only_decodes and self._is_prepared and self.num_prefill_requests == 0

    @property
    def _is_simple(self) -> bool:
        """Whether the step decoded one token of each request, and no request waits."""
        waits = self.paused_request_count or self.chunked_prefill_request_id != -1
        return self.num_prefill_requests == 0 and not waits

    def _advance(self, new_tokens: Tensor) -> bool:
        """Adds each request's new token, and a new block where its last one is full; returns False, changing nothing,
        if the free blocks do not suffice."""
        active, blocks = slice(self.total_request_count), self.kv_block_allocator
        offsets = self.request_last_kv_block_offset[active]
        full = (offsets == self.block_size_tokens - 1).nonzero().flatten()
        if len(full):
            if not blocks.can_take(len(full)):
                return False
            fresh = blocks.allocate_memory_blocks(len(full))
            self.request_to_kv_block_ids[full, self.request_kv_block_counts[full].long()] = fresh
            self.request_kv_block_counts[full] += 1
            self.request_last_kv_block_id[full], self.token_to_block_idx[full] = fresh, fresh.long()
            offsets[full] = -1
        offsets += 1
        self.token_to_local_position_within_kv_block[active] = offsets
        for positions in (self.request_kv_length_offsets, self.token_to_pos_ids, self.token_to_position_in_request):
            positions[active] += 1
        self.token_to_input_ids[active] = new_tokens
        return True


class LatentContext(PagedContext):
    """Caches a token's latent and shared key, with an indexer its index key, too, on every tensor-parallel rank."""

    def __init__(self, model_config, inference_config, memory=None, further_layers: int = 0):
        self._widths = latent_widths(model_config, self._indexers(model_config, inference_config, further_layers))
        super().__init__(model_config, inference_config, memory, further_layers)
        heads = model_config.num_attention_heads // inference_config.pg_collection.tp.size()
        width = max(model_config.qk_head_dim + model_config.qk_pos_emb_head_dim, model_config.v_head_dim)
        self._token_bytes = 2 * heads * width * model_config.params_dtype.itemsize

    def _indexers(self, model_config, inference_config, further_layers: int) -> list[bool]:
        """Whether each layer with a cache on this rank has an indexer."""
        pattern, stage = indexer_pattern(model_config), dist.get_rank(inference_config.pg_collection.pp)
        return [pattern[i] for i in layers_of_chunk(model_config, stage, None)] + [any(pattern)] * further_layers

    def _cache_config(self, model_config):
        """Returns a config of one layer whose one key and value together have as many numbers as all layers here."""
        return one_stage(model_config, 1, (1, sum(self._widths) // 2))

    def layer_caches(self) -> tuple[Tensor, ...]:
        """[blocks, block, W] of each layer, one after another in the memory."""
        blocks, size = self.memory_buffer.shape[1:3]
        parts = self.memory_buffer.flatten().split([blocks * size * width for width in self._widths])
        return tuple(part.view(blocks, size, -1) for part in parts)
