"""Rollout state of models with recurrent states: a state of each request beside the cache of keys and values."""

import copy
import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from megarl.batch import expand_ranges
from megarl.mcore import device
from megarl.mcore.attention.prefill_dedup import PrefillDedup
from megarl.mcore.inference.cache_size import GIB, cache_bytes, state_bytes
from megarl.mcore.inference.paged_context import PagedContext
from megarl.mcore.recurrence.layer_sizes import layer_sizes
from megarl.mcore.recurrence.runs import NONE, Runs
from megarl.mcore.recurrence.states import States


class RecurrentContext(PagedContext):
    """Keeps the states of a request under its id, which the session gives to no other request before this one ended.

    A request whose first tokens are read starts from zeros, so states are never cleared: one that is evicted or comes
    later reads its whole sequence again. States and cache share one memory, states first.
    """

    def __init__(
        self,
        model_config,
        inference_config,
        memory: Callable[[int], Tensor] | None = None,
        *,
        has_states: list[bool],
        has_cache: list[bool],
    ):
        """`has_states`, `has_cache`: whether each layer of this rank has a state, or keys and values. The rest as of
        `PagedContext`."""
        if inference_config.enable_prefix_caching:
            raise RuntimeError(
                "blocks of the cache hold no recurrent states: prefix caching would skip tokens silently"
            )
        self._has_states, self._has_cache, self._cache_memory = has_states, has_cache, memory
        ranks = inference_config.pg_collection.tp.size()
        self._taps, self._sizes = model_config.linear_conv_kernel_dim, layer_sizes(model_config, ranks)
        self._slots = inference_config.max_requests
        bytes_of_state = state_bytes(model_config, sum(has_states), ranks)
        self._state_bytes = self._slots * bytes_of_state
        left = cache_bytes(inference_config.buffer_size_gb, self._slots, bytes_of_state)
        inference_config = dataclasses.replace(inference_config, buffer_size_gb=left / GIB)
        super().__init__(model_config, inference_config, self._memory_after_states)

    def _memory_after_states(self, size: int) -> Tensor:
        """Memory for keys and values; makes the states before it."""
        kind, total = {"dtype": torch.uint8, "device": device.device()}, self._state_bytes + size
        memory = torch.empty(total, **kind) if self._cache_memory is None else self._cache_memory(total)
        of_layers = iter(memory[: self._state_bytes].view(torch.float32).chunk(max(1, sum(self._has_states))))
        self._states = tuple(self._states_in(next(of_layers)) if own else None for own in self._has_states)
        return memory[self._state_bytes :]

    def _states_in(self, memory: Tensor) -> States:
        """The states of a layer, in memory of just their size."""
        shapes = States.shapes(self._slots, self._taps, self._sizes)
        parts = memory.split([math.prod(shape) for shape in shapes])
        return States(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))

    def _cache_config(self, model_config):
        """Returns a config of one stage that has the layers with keys and values alone, but at least one."""
        config = copy.copy(model_config)
        config.num_layers, config.pipeline_model_parallel_size = max(1, sum(self._has_cache)), 1
        config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None
        config.pipeline_model_parallel_layout = config.virtual_pipeline_model_parallel_size = None
        return config

    reads_tables = False  # a decode step is planned on the host, with the states of its requests

    def _layer_caches(self) -> tuple[Tensor, ...]:
        """The cache of each layer; that of a layer without keys and values is the first one, which it does not use."""
        caches = iter(self.memory_buffer.unbind())
        return tuple(next(caches) if own else self.memory_buffer[0] for own in self._has_cache)

    def _states_of_step(self, rows: int, dedup: PrefillDedup | None) -> dict:
        if self.draft_rows is None:
            active = slice(self.paused_request_count, self.total_request_count)
            is_first = self.request_kv_length_offsets[active] == 0
            table = runs_of_step(self.request_ids[active], self.request_query_lengths[active], is_first, dedup)
            rows = rows if dedup is None else len(dedup.kept_tokens)
            return {"runs": self._with_padding(table, rows), "states": self._states}
        # Some of the rows may be dropped, so that states stay as they are until it is known which.
        requests, counts = torch.unique_consecutive(self.draft_rows.requests, return_counts=True)
        ids = self.request_ids[requests].long()
        table = torch.stack([counts.cumsum(0) - counts, counts, ids, torch.full_like(ids, NONE)], 1)
        return {"runs": self._with_padding(table, rows), "states": self._states, "drafted": {}}

    def _with_padding(self, table: Tensor, rows: int) -> Runs:
        used = int(table[:, 1].sum())
        padding = torch.tensor([[used, rows - used, NONE, NONE]])
        return Runs(torch.cat([table, padding]).contiguous(), 0, self._taps)

    def keep_states(self, counts: Tensor):
        """Computes the first `counts` [n] rows of each request again, for the states that they leave."""
        drafts, ids = self.draft_rows, self.request_ids[: self.total_request_count].long()
        first = (drafts.places == 0).nonzero().flatten()
        rows = expand_ranges(drafts.computed[first], counts)
        runs = Runs(torch.stack([counts.cumsum(0) - counts, counts, ids, ids], 1).contiguous(), 0, self._taps)
        for layer, inputs in self._plan.drafted.items():
            inputs.at(rows.to(inputs.x.device)).apply(self._sizes, runs, self._states[layer])


def runs_of_step(ids: Tensor, queries: Tensor, is_first: Tensor, dedup: PrefillDedup | None) -> Tensor:
    """[N, 4] the runs of an engine's step without padding; a request keeps its state under its id.

    Args:
        ids: [n] of the requests.
        queries: [n] rows of each; `is_first`: [n] bool, whether they are its first ones.
        dedup: equal prompts, computed once: the others get copies of the state.
    """
    ids, queries = ids.long(), queries.long()
    before, starts = torch.where(is_first, NONE, ids), queries.cumsum(0) - queries
    if dedup is None:
        return torch.stack([starts, queries, before, ids], 1)
    kept = queries[dedup.requests]
    kept_starts = kept.cumsum(0) - kept
    table = torch.stack([kept_starts, kept, before[dedup.requests], ids[dedup.requests]], 1)
    originals = torch.searchsorted(kept_starts, dedup.inverse[starts], right=True) - 1
    copies = torch.stack([torch.zeros_like(ids), torch.zeros_like(ids), table[originals, 3], ids], 1)
    return torch.cat([table, copies[copies[:, 2] != ids]])
