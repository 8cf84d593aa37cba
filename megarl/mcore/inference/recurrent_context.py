"""Rollout state of models with recurrent states: a state of each request beside the cache of others' keys or latents.

With prefix caching there are snapshots of states, which later prompts that begin alike continue. A state is of all
tokens before it and as large as the keys and values of thousands, so it is kept only at the end of the last whole block
of each prompt that some token follows. Other responses, and the next turn of an episode, continue there.
"""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.batch import expand_ranges
from megarl.mcore import device
from megarl.mcore.attention.cache_attention import PrefillDedup
from megarl.mcore.inference.cache_size import GIB, Shapes, bytes_of_shapes, cache_bytes, one_stage, snapshot_count
from megarl.mcore.inference.paged_context import LatentContext, PagedContext
from megarl.mcore.model.decoder_layer import StepPlan
from megarl.mcore.recurrence import apply_rule, layer_sizes
from megarl.mcore.recurrence.runs import NONE, Runs, States

if TYPE_CHECKING:
    from megarl.mcore.inference.device_decode import DeviceStep


class RecurrentContext(PagedContext):
    """Keeps the states of a request under its id, which the session gives to no other request before this one ended. A
    request whose first tokens are read starts from zeros, so states are never cleared: one that is evicted or comes
    later reads its whole sequence again. With prefix caching there are further states, for ends of prompts, and a
    prompt continues the last of them on its way. States and cache share one memory, states first."""

    def __init__(
        self,
        model_config,
        inference_config,
        memory: Callable[[int], Tensor] | None = None,
        *,
        has_cache: list[bool],
        snapshots: int | None,
        has_states: Sequence[bool] = (),
    ):
        """Arguments as of `PagedContext`; `has_cache`, `has_states`: whether each layer of this rank has keys and
        values, or a state; `snapshots`: states for ends of prompts, with prefix caching; None: one for each request."""
        self._has_cache, self._has_states, self._cache_memory = has_cache, has_states, memory
        self._taps = model_config.linear_conv_kernel_dim
        self._shapes = self._state_shapes(model_config, inference_config.pg_collection.tp.size())
        requests = inference_config.max_requests
        count = snapshot_count(requests, inference_config.enable_prefix_caching, snapshots)
        self._slots = requests + count
        self.snapshots = StateSnapshots(range(requests, self._slots))
        self._continued: dict[int, int] = {}  # id of a request that joins the next step -> the snapshot it continues
        bytes_of_state = sum(map(bytes_of_shapes, self._shapes))
        self._state_bytes = self._slots * bytes_of_state
        left = cache_bytes(inference_config.buffer_size_gb, requests, bytes_of_state, count)
        inference_config = dataclasses.replace(inference_config, buffer_size_gb=left / GIB)
        super().__init__(model_config, inference_config, self._memory_after_states)

    def _state_shapes(self, model_config, ranks: int) -> list[Shapes]:
        """Of each layer, or of each recurrence of this rank: what one request's state has. None: there is none."""
        self._sizes = layer_sizes(model_config, ranks)
        own = [shape[1:] for shape in States.shapes(1, self._taps, self._sizes)]
        return [own if has_state else [] for has_state in self._has_states]

    def _memory_after_states(self, size: int) -> Tensor:
        """Memory for keys and values; makes the states before it."""
        kind, total = {"dtype": torch.uint8, "device": device.device()}, self._state_bytes + size
        memory = torch.empty(total, **kind) if self._cache_memory is None else self._cache_memory(total)
        sizes = [self._slots * math.prod(shape) for shapes in self._shapes for shape in shapes]
        parts = iter(memory[: self._state_bytes].view(torch.float32).split(sizes))
        self._states = tuple(
            self._states_in([next(parts).view(self._slots, *shape) for shape in shapes]) for shapes in self._shapes
        )
        return memory[self._state_bytes :]

    def _states_in(self, parts: list[Tensor]) -> Any:
        """The states of a layer, from tensors of their shapes, as its rule takes them."""
        return States(*parts) if parts else None

    def _cache_config(self, model_config):
        """Returns a config of one stage that has the layers with keys and values alone, but at least one."""
        return super()._cache_config(one_stage(model_config, max(1, sum(self._has_cache))))

    def _device_plan(self, step: "DeviceStep", frequencies: Tensor | None) -> StepPlan:
        plan = super()._device_plan(step, frequencies)
        return dataclasses.replace(plan, runs=step.states, states=self._states)

    drafts_on_device = False  # states take the rows of a step only when it is known which drafts were right

    def goes_on_in_place(self) -> bool:
        """A step that was launched cannot be dropped: it has changed the states."""
        return False

    def layer_caches(self) -> tuple[Tensor, ...]:
        """The cache of each layer; that of a layer without keys and values is the first one, which it does not use."""
        caches = super().layer_caches()
        left = iter(caches)
        return tuple(next(left) if own else caches[0] for own in self._has_cache)

    def reset(self, preserve_prefix_cache: bool = False, *, preserve_counters: bool = False):
        """Drops all requests and snapshots."""
        super().reset(preserve_prefix_cache, preserve_counters=preserve_counters)
        self.snapshots.clear()
        self._continued.clear()
        self.kv_block_allocator.on_blocks_deregistered = lambda _, hashes: self.snapshots.drop(hashes)

    def _compute_prefix_match(self, req, prefill_chunk_length: int, record_mamba_match: bool = False):
        """As Megatron's, but a prompt finds its blocks up to the last one with a snapshot before its last token, and
        reads the others again; a further part of a prompt continues the request's own state."""
        match = super()._compute_prefix_match(req, prefill_chunk_length, record_mamba_match)
        if not self.enable_prefix_caching:
            return match
        found, _, before, needed, _, _ = match
        limit = 0 if before else min(len(found), (prefill_chunk_length - 1) // self.block_size_tokens)
        known = (n for n in range(limit, 0, -1) if req.precomputed_block_hashes[n - 1] in self.snapshots)
        count = next(known, 0)
        skipped = count * self.block_size_tokens
        return found[:count], max(0, needed - before - count), before, needed, skipped, prefill_chunk_length - skipped

    def hashes_to_find(self, request) -> list[int]:
        """Those of whole blocks before the prompt's last token."""
        return request.precomputed_block_hashes[: (len(request.prompt_tokens) - 1) // self.block_size_tokens]

    def hashes_to_keep(self, request, found: int) -> list[int]:
        """The one at whose end a snapshot is made."""
        return self.hashes_to_find(request)[found:][-1:]

    def continue_prefix(self, request, skipped: int):
        """Makes a new request continue the snapshot after its first tokens, which are skipped."""
        if skipped:
            last = request.precomputed_block_hashes[skipped // self.block_size_tokens - 1]
            self._continued[request.request_id] = self.snapshots.use(last)

    def add_request(self, req, prefill_chunk_length: int | None = None):
        """As Megatron's, which adds the parts of prompts that do not fit into a step."""
        is_first = req.finished_chunk_token_count == 0
        super().add_request(req, prefill_chunk_length)
        if is_first and self.enable_prefix_caching:
            self.continue_prefix(req, int(self.request_kv_length_offsets[self.total_request_count - 1]))

    def _starts(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """[n] the state that each request's rows continue; `offsets`: tokens before them."""
        starts = torch.where(offsets == 0, NONE, ids)
        for row, number in enumerate(ids.tolist()) if self._continued else ():
            if number in self._continued:
                starts[row] = self._continued[number]
        return starts

    def _new_snapshots(self, ids: Tensor, offsets: Tensor, queries: Tensor) -> dict[int, tuple[int, int]]:
        """Request of the step -> (its rows before the end of a block, slot for the state there)."""
        if not self.enable_prefix_caching or not self.num_prefill_requests:
            return {}
        found, pinned = {}, set(self._continued.values())
        active = self.of_step
        for row in self.request_in_prefill_status_tensor[active].nonzero().flatten().tolist():
            request = self.request_of(int(ids[row]))
            hashes = self.hashes_to_find(request)  # Megatron gives none to a request that was evicted
            rows = len(hashes) * self.block_size_tokens - int(offsets[row])
            if not 0 < rows <= int(queries[row]) or hashes[-1] in self.snapshots:
                continue
            if (slot := self.snapshots.take(hashes[-1], pinned)) is not None:
                found[row] = rows, slot
                pinned.add(slot)
        return found

    def _states_of_step(self, rows: int, dedup: PrefillDedup | None) -> dict:
        if self.draft_rows is None:
            active = self.of_step
            ids, queries = self.request_ids[active].long(), self.request_query_lengths[active].long()
            offsets = self.request_kv_length_offsets[active].long()
            starts, snapshots = self._starts(ids, offsets), self._new_snapshots(ids, offsets, queries)
            self._continued.clear()
            table = runs_of_step(ids, queries, starts, dedup, snapshots)
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
        rows = expand_ranges(drafts.computed[first], counts).to(device.device())
        runs = Runs(torch.stack([counts.cumsum(0) - counts, counts, ids, ids], 1).contiguous(), 0, self._taps)
        for layer, inputs in self._plan.drafted.items():
            self._take(inputs.at(rows), runs, layer)

    def _take(self, inputs, runs: Runs, layer: int):
        """Computes rows that a layer's states take."""
        apply_rule(inputs, self._sizes, runs, self._states[layer])


class LatentRecurrentContext(RecurrentContext, LatentContext):
    """States of some layers beside a cache of latents of others, which have no indexers."""

    def _indexers(self, model_config, inference_config, further_layers):
        return [False] * max(1, sum(self._has_cache))


def runs_of_step(
    ids: Tensor, queries: Tensor, before: Tensor, dedup: PrefillDedup | None, snapshots: dict[int, tuple[int, int]]
) -> Tensor:
    """[N, 4] the runs of an engine's step without padding; a request keeps its state under its id.

    Args:
        ids, queries, before: [n] int64 of the requests; rows of each; the state that they continue, or `NONE`.
        dedup: equal prompts, computed once: the others get copies of the state.
        snapshots: of some requests, (rows, state in which these leave theirs): the other rows continue that one.
    """
    starts = queries.cumsum(0) - queries
    if dedup is None:
        return _cut(torch.stack([starts, queries, before, ids], 1), snapshots)
    kept = queries[dedup.requests]
    kept_starts = kept.cumsum(0) - kept
    table = torch.stack([kept_starts, kept, before[dedup.requests], ids[dedup.requests]], 1)
    originals = torch.searchsorted(kept_starts, dedup.inverse[starts], right=True) - 1
    copies = torch.stack([torch.zeros_like(ids), torch.zeros_like(ids), table[originals, 3], ids], 1)
    cuts = {row: snapshots[i] for row, i in enumerate(dedup.requests.tolist()) if i in snapshots}
    return torch.cat([_cut(table, cuts), copies[copies[:, 2] != ids]])


def _cut(table: Tensor, cuts: dict[int, tuple[int, int]]) -> Tensor:
    """Runs of which some are cut in two; `cuts`: by number of a run, (rows of the first, state between both)."""
    found = []
    for number, run in enumerate(table.tolist() if cuts else ()):
        if number not in cuts:
            found.append(run)
            continue
        (first, rows, before, after), (count, between) = run, cuts[number]
        found += [(first, count, before, between), (first + count, rows - count, between, after)]
    return torch.tensor(found) if cuts else table


class StateSnapshots:
    """Which slot of the states holds the one after a block, by the hash of all tokens up to the block's end. The host's
    bookkeeping alone: it decides the same on all ranks of a replica."""

    def __init__(self, slots: range):
        """`slots`: numbers of the states that no request has."""
        self._slots = slots
        self.clear()

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._kept

    def clear(self):
        """Drops all snapshots, which may be of older weights."""
        self._kept: OrderedDict[int, int] = OrderedDict()  # the first was not used for the longest time
        self._free = list(reversed(self._slots))

    def use(self, block_hash: int) -> int:
        """Returns the slot of a snapshot that is there."""
        self._kept.move_to_end(block_hash)
        return self._kept[block_hash]

    def take(self, block_hash: int, pinned: Collection[int]) -> int | None:
        """Returns a slot for a new snapshot, that of the oldest one if none is free; None if all slots are `pinned`."""
        if not self._free:
            oldest = next((kept for kept, slot in self._kept.items() if slot not in pinned), None)
            if oldest is None:
                return None
            self.drop([oldest])
        self._kept[block_hash] = slot = self._free.pop()
        return slot

    def drop(self, hashes: Iterable[int]):
        """Frees the slots of blocks that leave the cache."""
        self._free += [self._kept.pop(block_hash) for block_hash in hashes if block_hash in self._kept]
