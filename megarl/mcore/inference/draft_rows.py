"""The rows of a decode step that also reads drafted tokens: one for each token, with the keys before it.

A row is for every kernel what a request is in a step without drafts: a token, its cache slot, and the number of keys
that it reads. So its numbers have the same bits. All rows of a step write their keys before any row reads. Rows after
the first wrong draft of a request leave keys in slots that no row reads until they are written again.

Requests with the same sequence share their rows; keys, values and routes of these are copied to the slots of the
others. Siblings of a group have the same prompt and draw the same tokens as long as the policy is sure of them.
Sequences are never compared: two requests stay in a group while they draw the same tokens.
Shapes: n requests in m groups with the same sequence, T computed rows, S ≥ T rows of all requests.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.batch import expand_counts


class Groups(NamedTuple):
    """The n requests of a step in m groups with the same sequence."""

    first: np.ndarray  # [m] index of a request of each group
    of: np.ndarray  # [n] the group of each request

    @classmethod
    def apart(cls, count: int) -> "Groups":
        """Each request in a group of its own."""
        return cls(np.arange(count), np.arange(count))

    @property
    def sizes(self) -> np.ndarray:
        """[m] requests of each group."""
        return np.bincount(self.of, minlength=len(self.first))


class SequenceGroups:
    """Follows the groups of an engine's requests from step to step."""

    def __init__(self):
        self.reset()

    def reset(self):
        self._prompts: dict[tuple[int, ...], int] = {}
        self._known: dict[int, tuple[int, int]] = {}  # request -> its group, and the length of that group's sequence
        self._unseen: set[int] = set()  # requests that wait for their first step
        self._next, self._are_apart = 0, True

    def begin(self, request_id: int, prompt: Sequence[int]):
        group = self._prompts.setdefault(tuple(prompt), self._next)
        self._next += group == self._next
        self._known[request_id] = group, len(prompt)
        self._unseen.add(request_id)

    @property
    def are_apart(self) -> bool:
        """Whether no requests of the next step have the same sequence, known without `update`."""
        return self._are_apart and not self._unseen

    def update(self, ids: Sequence[int], lengths: Sequence[int], last: Sequence[int], max_growth: int = 1) -> Groups:
        """Returns the groups of a step's requests [n]. `lengths`, `last`: [n] of their sequences, and their last
        tokens; `max_growth`: tokens that a sequence may have got since the last call: as many of the requests of a
        group are the same if as many of their tokens and the last ones are. One with more gets a group of its own."""
        found, first, of = {}, [], []
        for i, (request, length, token) in enumerate(zip(ids, lengths, last, strict=True)):
            group, before = self._known[request]
            growth = length - before
            key = (group, growth, token if growth else 0) if 0 <= growth <= max_growth else i
            number = found.setdefault(key, len(first))
            if number == len(first):
                first.append(i)
            of.append(number)
            self._known[request] = self._next + number, length
        self._next += len(first)
        if self._unseen:
            self._unseen.difference_update(ids)
        self._are_apart = len(first) == len(ids)
        return Groups(np.array(first), np.array(of))


# -- rows ------------------------------------------------------------------------------------------------------------


class DraftRows(NamedTuple):
    """The rows of a step: for each request, its last token and then its drafted ones."""

    requests: Tensor  # [T] int64 index of each computed row's request among those of the step
    positions: Tensor  # [T] int64 position of each computed row's token in its request
    owners: Tensor  # [S] int64 request of each row, ascending
    places: Tensor  # [S] int64 number of the row in its request
    computed: Tensor  # [S] int64 the computed row that stands for each
    padded_tokens: int  # of the step without drafts

    @property
    def owner_positions(self) -> Tensor:
        """[S] position of each row's token."""
        return self.positions[self.computed]


def fit_to_blocks(context, counts: Tensor) -> Tensor:
    """How many of `counts` [n] drafted tokens of each request the cache has room for; allocates their blocks, or none
    if the free ones do not suffice for all. Requests with sequences of the same length and counts get the same."""
    n, size = context.total_request_count, context.block_size_tokens
    blocks = context.kv_block_allocator
    offsets = context.request_last_kv_block_offset[:n].long()
    further = (offsets + counts) // size
    total = int(further.sum())
    if not total:
        return counts
    if not blocks.can_take(total):
        return counts.minimum(size - 1 - offsets)
    rows, place = expand_counts(further)
    columns = context.request_kv_block_counts[:n].long()[rows] + place
    context.request_to_kv_block_ids[rows, columns] = blocks.allocate_memory_blocks(total)
    return counts


def begin_step(context, tokens: Tensor, counts: Tensor, groups: Groups, padded: int | None = None) -> dict:
    """Prepares a step in which each group reads its last token and drafted ones; all its requests have blocks for them.
    Returns the inputs of the forward pass. `tokens`: [Σ counts] int64 drafted ones. `counts`: [m] of each group.
    `padded`: rows of the step with padding; by default those of Megatron's steps."""
    c, n = context, context.total_request_count
    if not c.is_prepared:
        c.initialize_attention_state()  # after requests ended, Megatron's tensors have to be set again
    c.only_decodes, c._plan = False, None
    of, first = torch.from_numpy(groups.of), torch.from_numpy(groups.first)
    rows = counts + 1
    group, place = expand_counts(rows)
    owners, places = expand_counts(rows[of])
    requests = first[group]
    positions = c.request_kv_length_offsets[:n].long()[requests] + place
    computed = (rows.cumsum(0) - rows)[of[owners]] + places
    total = len(requests)
    padded = c.round_up_tokens(total) if padded is None else padded
    c.draft_rows = DraftRows(requests, positions, owners, places, computed, c.padded_active_token_count)
    c.active_token_count = total
    ids = c.token_to_input_ids[:n][requests]
    ids[place > 0] = tokens
    c.token_to_input_ids[:total] = ids
    c.token_to_input_ids[total:padded] = 0  # padding is no row of an image that is gone
    _set_tokens(c, _blocks(c, requests, positions), positions, padded)
    c.padded_active_token_count = padded
    c.transfer_bookkeeping_to_gpu()
    ids, positions = (x[:padded].unsqueeze(0) for x in (c.gpu_view.token_to_input_ids, c.gpu_view.token_to_pos_ids))
    return {"tokens": ids, "position_ids": positions, "attention_mask": None}


def accepted_counts(context, drawn: Tensor) -> Tensor:
    """Returns [n] how many rows of each request drew its next tokens; `drawn`: [S] the token after each row."""
    rows = context.draft_rows
    is_last = torch.ones(len(rows.owners), dtype=torch.bool)
    is_last[:-1] = rows.owners[1:] != rows.owners[:-1]
    ends = is_last | context.end_tokens.contains(drawn, *context.sampled_rows())
    ends[:-1] |= drawn[:-1] != context.token_to_input_ids[rows.computed[1:]]
    ends, last = ends.nonzero().flatten(), is_last.nonzero().flatten()
    first = torch.cat([last.new_zeros(1), last[:-1] + 1])
    return ends[torch.searchsorted(ends, first)] - first + 1


def copy_to_group(context, counts: Tensor):
    """Copies keys, values and routes of the first `counts` [n] rows of each request from the computed rows."""
    c, rows = context, context.draft_rows
    is_copied = (rows.requests[rows.computed] != rows.owners) & (rows.places < counts[rows.owners])
    if not is_copied.any():
        return
    positions, computed = rows.owner_positions[is_copied], rows.computed[is_copied]
    source = _slots(c, rows.requests[computed], positions)
    target = _slots(c, rows.owners[is_copied], positions)
    places = source.to(c.memory_buffer.device), target.to(c.memory_buffer.device)
    for cache in (each.flatten(0, 1) for each in c.layer_caches()):
        cache.index_copy_(0, places[1], cache.index_select(0, places[0]))
    c.kv_block_allocator.copy_routes(source, target)


def end_step(context, counts: Tensor):
    """Keeps the first `counts` [n] ≥ 1 tokens of each request's rows, as if each had been decoded in a step of its own,
    the last of them now. Frees blocks that only later rows used."""
    c, size = context, context.block_size_tokens
    n = c.total_request_count
    c.keep_states(counts)
    last = c.request_kv_length_offsets[:n].long() + counts - 1
    used = last // size + 1
    pages = c.request_to_kv_block_ids[:n]
    is_unused = (torch.arange(pages.shape[1]) >= used.unsqueeze(1)) & (pages >= 0)
    if is_unused.any():
        c.kv_block_allocator.release_memory_blocks(pages[is_unused])
        pages.masked_fill_(is_unused, -1)
    blocks = pages.gather(1, used.unsqueeze(1) - 1).squeeze(1)
    c.request_kv_block_counts[:n], c.request_last_kv_block_id[:n] = used.int(), blocks
    c.request_last_kv_block_offset[:n], c.request_kv_length_offsets[:n] = (last % size).int(), last.int()
    c.padded_active_token_count, c.active_token_count = c.draft_rows.padded_tokens, n
    c.draft_rows = None
    _set_tokens(c, blocks, last, c.padded_active_token_count)


def _blocks(context, requests: Tensor, positions: Tensor) -> Tensor:
    return context.request_to_kv_block_ids[requests, positions // context.block_size_tokens]


def _slots(context, requests: Tensor, positions: Tensor) -> Tensor:
    size = context.block_size_tokens
    return _blocks(context, requests, positions).long() * size + positions % size


def _set_tokens(context, blocks: Tensor, positions: Tensor, padded: int):
    """Sets the tokens of a step of `padded` tokens: their blocks and positions; padding is in the spare block."""
    c, count = context, len(positions)
    c.token_to_block_idx[:count] = blocks.to(c.token_to_block_idx.dtype)
    c.token_to_local_position_within_kv_block[:count] = positions % c.block_size_tokens
    c.token_to_pos_ids[:count] = c.token_to_position_in_request[:count] = positions
    c.token_to_block_idx[count:padded] = c.kv_block_allocator.dummy_block_idx
    c.token_to_local_position_within_kv_block[count:padded] = 0
    c.token_to_position_in_request[count:padded] = 0
