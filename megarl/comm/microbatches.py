"""Splits a step's sequences into mini-batches and micro-batches.

Mini-batches are sets of sequence ids drawn from (seed, step, epoch), of whole groups where their size allows. A replica
bin-packs its sequences of a mini-batch under a hard token cap, with about equal FLOPs each; all run equally many, some
of them blank. Responses to the same prompt stay together, because models then compute it once; the cap counts it each.
"""

import bisect
import dataclasses
import heapq
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.token_sampling import stream_keys, uniforms
from megarl.arguments import RoleSettings, Settings
from megarl.batch import FIELDS, Batch, HostMetadata, SharedPrefix, expand_ranges
from megarl.comm.role_mesh import RoleGroups
from megarl.groups import PromptGroups
from megarl.mcore import device
from megarl.mcore.parallel.process_groups import all_reduce

ORDER_STREAM = -1  # no prompt has this number, so the shuffle and the responses use disjoint random streams


def minibatch_ids(count: int, size: int | None, seed: int, step: int, epoch: int) -> list[Tensor]:
    """The numbers 0 … count − 1 in random mini-batches of `size`, of which the last may be smaller; None: in one."""
    if size is None or size >= count:
        return [torch.arange(count)]
    stream = torch.full((count,), ORDER_STREAM, dtype=torch.int64)
    keys = stream_keys(seed, step, stream, torch.full_like(stream, epoch))
    order = uniforms(keys, torch.arange(count)).argsort(stable=True)
    return [ids.sort().values for ids in order.split(size)]


def minibatches_of_step(settings: Settings, groups: PromptGroups, step: int, epoch: int) -> list[Tensor]:
    """Sequence ids of the mini-batches of a step, by `minibatch_ids`: of whole groups if that is possible, counted in
    groups of `--samples-per-prompt` of any size, so that a step has as many updates as the learning rate expects."""
    size, seed = settings.minibatch_groups, settings.seed
    if size is not None:
        return [groups.ids_of(drawn) for drawn in minibatch_ids(len(groups), size, seed, step, epoch)]
    return minibatch_ids(groups.count, settings.minibatch_size, seed, step, epoch)


def positions_of(batch: Batch, ids: Tensor) -> Tensor:
    """Positions in the batch of the sequences with these ids; ids of other replicas are ignored."""
    return torch.isin(batch.sequence_ids, ids.to(batch.sequence_ids.device)).nonzero().flatten()


def updates_of_step(settings: Settings, batch: Batch, groups: PromptGroups, step: int) -> Iterator[Tensor]:
    """Positions in this replica's batch for each update of a step; `groups`: of all replicas."""
    for epoch in range(settings.ppo_epochs):
        for ids in minibatches_of_step(settings, groups, step, epoch):
            yield positions_of(batch, ids)


def sequence_flops(lengths: Tensor, hidden: int) -> Tensor:
    """[N] int64 cost of sequences of length s: s² + 12·hidden·s, in units of 2·hidden FLOPs per layer. Causal attention
    takes 2·hidden·s² FLOPs: each token attends to half of the sequence on average, once for the scores and once for the
    values. The linear layers have 12·hidden² weights (4 in attention, 8 in the MLP), so 24·hidden²·s FLOPs. Only ratios
    matter. int64, because s² overflows int32 from 46,341 tokens on."""
    lengths = lengths.to(torch.int64)
    return lengths * (lengths + 12 * hidden)


class PromptPrefixes(NamedTuple):
    """The prompts that sequences begin with; both [N] int64, on the host."""

    ids: Tensor  # equal for equal prompts
    shared: Tensor  # tokens of the prompt that one sequence can compute for all


def bin_pack(
    lengths: Tensor,
    cap: int,
    hidden: int,
    count: int = 1,
    sequences_per_example: int = 1,
    prompts: PromptPrefixes | None = None,
) -> list[Tensor]:
    """Packs sequences into micro-batches of at most `cap` tokens: the positions of each, the most expensive first.

    Best-fit decreasing finds the number of micro-batches; `count` is used if it is larger and enough sequences exist.
    Then the FLOPs are balanced. A sequence longer than the cap gets a micro-batch to itself; programs reject settings
    that allow one.

    `sequences_per_example` adjacent sequences, such as the two of a preference pair, are never split. With `prompts`,
    adjacent sequences with the same prompt form a run and stay together as far as the cap and `count` allow; a run's
    shared prompt counts once in its FLOPs.
    """
    if not len(lengths):
        return []
    if count == 1 and int(lengths.sum()) <= cap:
        return [torch.arange(len(lengths))]
    ids = None if prompts is None else prompts.ids[::sequences_per_example].tolist()
    example_lengths = lengths.view(-1, sequences_per_example).sum(1).tolist()
    starts = sequences_per_example * np.array(_run_starts(example_lengths, cap, count, ids))
    flops, saved = sequence_flops(lengths, hidden).numpy(), np.zeros(len(lengths), np.int64)
    if prompts is not None:
        saved = 12 * hidden * prompts.shared.numpy()
    run_lengths, run_flops = np.add.reduceat(lengths.numpy(), starts), np.add.reduceat(flops - saved, starts)
    run_flops = run_flops + saved[starts]
    runs = np.split(np.arange(len(lengths)), starts[1:])
    bins = _bin_pack_runs(run_lengths.tolist(), run_flops.tolist(), cap, count)
    return [torch.from_numpy(np.concatenate([runs[run] for run in members])) for members in bins]


def _run_starts(lengths: list[int], cap: int, count: int, ids: list[int] | None) -> list[int]:
    """Ascending start positions of runs: adjacent examples with the same id whose lengths fit under the cap together.
    At least `count` runs if enough examples exist. Without `ids` every example is a run."""
    if ids is None:
        return list(range(len(lengths)))
    starts, tokens = [], cap
    for i, length in enumerate(lengths):
        tokens += length
        if not i or ids[i] != ids[i - 1] or tokens > cap:
            starts.append(i)
            tokens = length
    while len(starts) < min(count, len(lengths)):  # split the longest run
        ends = [*starts[1:], len(lengths)]
        longest = max(range(len(starts)), key=lambda run: ends[run] - starts[run])
        starts.insert(longest + 1, (starts[longest] + ends[longest]) // 2)
    return starts


def _bin_pack_runs(lengths: list[int], flops: list[int], cap: int, count: int) -> list[list[int]]:
    order = sorted(range(len(lengths)), key=lambda run: (-lengths[run], run))
    bins = _best_fit(order, lengths, cap)
    bins = _balance(order, lengths, flops, cap, max(count, len(bins))) or bins
    return sorted((sorted(members) for members in bins if members), key=lambda m: (-sum(flops[i] for i in m), m))


def _best_fit(order: list[int], lengths: list[int], cap: int) -> list[list[int]]:
    """Best-fit decreasing: each run into the fullest bin with room; at most 11/9 of the fewest bins (Johnson 1973)."""
    bins, free = [], []  # free: (tokens left, bin), ascending
    for run in order:
        fit = bisect.bisect_left(free, (lengths[run], -1))
        if fit == len(free):
            bins.append([])
            free.append((cap, len(bins) - 1))
        room, chosen = free.pop(fit)
        bins[chosen].append(run)
        bisect.insort(free, (room - lengths[run], chosen))
    return bins


def _balance(order: list[int], lengths: list[int], flops: list[int], cap: int, count: int) -> list[list[int]] | None:
    """Puts each run of `order` into the bin with the fewest FLOPs that has room; None if a run fits into no bin."""
    bins = [[] for _ in range(count)]
    heap = [(0, 0, number) for number in range(count)]  # (FLOPs, tokens, bin)
    for run in order:
        full = []
        while heap and heap[0][1] + lengths[run] > cap:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, tokens, chosen = heap[0]
        heapq.heapreplace(heap, (load + flops[run], tokens + lengths[run], chosen))
        bins[chosen].append(run)
        for entry in full:
            heapq.heappush(heap, entry)
    return bins


def blank_sequences(fields: list[str], device, sequences: int = 1) -> Batch:
    """One-token sequences without weight, for a replica that must run as many micro-batches as the others."""
    values = {name: torch.zeros(sequences, dtype=FIELDS[name]["dtype"], device=device) for name in fields}
    blank = Batch(**{**values, "lengths": torch.ones(sequences, dtype=torch.int64, device=device)})
    teachers = torch.zeros(sequences, dtype=torch.int64) if "teacher_ids" in fields else None
    ones, mask = torch.ones(sequences, dtype=torch.int64), torch.zeros(sequences, dtype=torch.bool)
    blank.host_metadata = HostMetadata(lengths=ones, response_mask=mask, teacher_ids=teachers)
    return blank


def build_microbatches(
    batch: Batch, groups: list[Tensor], prompts: PromptPrefixes | None = None
) -> list[tuple[Batch, Tensor]]:
    """[(micro-batch, positions of its sequences in `batch`)] for groups of positions on the host, to which all is
    copied once. `prompts`: of all sequences; None: none is shared. RuntimeError: those with the same id differ."""
    lengths, mask = batch.lengths.cpu(), batch.response_mask
    mask = None if mask is None else mask.cpu()
    teachers = None if batch.teacher_ids is None else batch.teacher_ids.cpu()
    row_starts = None if batch.row_starts is None else batch.row_starts.cpu()
    starts, microbatches = lengths.cumsum(0) - lengths, []
    for group in groups:
        rows = expand_ranges(starts[group], lengths[group])
        positions, tokens = device.to_device([group.numpy(), rows.numpy()])
        microbatch = batch.take(positions, tokens)
        shared = None if prompts is None else _shared_prefix(prompts.ids[group].numpy(), prompts.shared[group])
        microbatch.host_metadata = HostMetadata(
            lengths=lengths[group],
            response_mask=None if mask is None else mask[rows],
            shared=shared,
            teacher_ids=None if teachers is None else teachers[group],
        )
        if row_starts is not None and bool((starts_here := row_starts[rows]).any()):
            microbatch.host_metadata = _by_rows(microbatch.host_metadata, starts_here)
        microbatches.append((microbatch, positions))
    _check_shared_prefixes([microbatch for microbatch, _ in microbatches])
    return microbatches


def _by_rows(host: HostMetadata, row_starts: Tensor) -> HostMetadata:
    """The same with each row, of `row_starts` [T] bool, as a sequence; the first row of each has its prompt."""
    first = host.lengths.cumsum(0) - host.lengths
    begins = row_starts.index_fill(0, first, True).nonzero().flatten()
    sequence = torch.searchsorted(first, begins, right=True) - 1
    shared = None
    if host.shared is not None:
        is_first, rows = begins == first[sequence], torch.arange(len(begins))
        first_rows = is_first.nonzero().flatten()
        holders = torch.where(is_first, first_rows[host.shared.holders[sequence]], rows)
        shared = SharedPrefix(holders, host.shared.tokens[sequence].masked_fill(~is_first, 0))
    return dataclasses.replace(
        host,
        lengths=torch.diff(begins, append=begins.new_tensor([len(row_starts)])),
        shared=shared,
        teacher_ids=None if host.teacher_ids is None else host.teacher_ids[sequence],
    )


def _check_shared_prefixes(microbatches: list[Batch]):
    mismatches = []
    for microbatch in microbatches:
        if (shared := shared_tokens(microbatch.host_metadata)) is not None:
            own, held = shared
            mismatches.append((microbatch.tokens[own] != microbatch.tokens[held]).sum())
    if mismatches and int(count := torch.stack(mismatches).sum()):
        raise RuntimeError(f"{int(count)} prompt tokens differ between sequences with the same prompt id")


def shared_tokens(host: HostMetadata) -> tuple[Tensor, Tensor] | None:
    """Indices of a micro-batch's tokens that another sequence holds, and of those that are held for them: both [n]
    int64, on the device. None: no prefix is shared."""
    if host.shared is None:
        return None
    starts, shared = host.lengths.cumsum(0) - host.lengths, host.shared
    own, held = expand_ranges(starts, shared.tokens), expand_ranges(starts[shared.holders], shared.tokens)
    own, held = device.to_device([own.numpy(), held.numpy()])
    return own, held


def _shared_prefix(ids: np.ndarray, tokens: Tensor) -> SharedPrefix | None:
    """The first sequence of each prompt holds the prefix for the others; None if all prompts differ."""
    _, first, prompt = np.unique(ids, return_index=True, return_inverse=True)
    holders = torch.from_numpy(first[prompt])
    tokens = tokens.masked_fill(holders == torch.arange(len(holders)), 0)
    return SharedPrefix(holders, tokens) if bool(tokens.any()) else None


def prompt_prefixes(batch: Batch) -> PromptPrefixes | None:
    """The prompts of a batch, if it has them, without their last tokens: what follows differs between responses."""
    if batch.prompt_ids is None or batch.prompt_lengths is None:
        return None
    ids, lengths = batch.prompt_ids.cpu(), batch.prompt_lengths.cpu()
    if batch.solved is not None:  # what an environment adds to a prompt may differ between episodes
        ids = _ids_of_tokens(batch, lengths)
    return PromptPrefixes(ids, (lengths - 1).clamp_(min=0))


def _ids_of_tokens(batch: Batch, lengths: Tensor) -> Tensor:
    """[N] int64, the same number for sequences whose prompts, of these lengths, have the same tokens."""
    tokens, numbers = batch.tokens.cpu().numpy(), {}
    spans = zip(batch.cu_seqlens.tolist(), lengths.tolist(), strict=False)
    prompts = [tokens[start : start + length].tobytes() for start, length in spans]
    return torch.tensor([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], dtype=torch.int64)


def role_microbatches(
    batch: Batch, positions: Tensor, role: RoleSettings, role_groups: RoleGroups, sequences_per_example: int = 1
) -> list[tuple[Batch, Tensor]]:
    """[(micro-batch, positions of its sequences in `batch`)], equally many on all replicas of a role.

    Blank micro-batches have no positions. Each prompt is computed once in a micro-batch. A collective of the role.

    Args:
        positions: [N] ascending, the sequences to pack.
        role: has the largest number of tokens in a micro-batch, the model's hidden size, which weighs attention against
            the linear layers, and what divides the number of micro-batches (the pipeline size with virtual stages).
        sequences_per_example: adjacent sequences that share a micro-batch, as in `bin_pack`.
    """
    cap, hidden = role.max_tokens_per_microbatch, role.megatron.hidden_size
    positions, prompts = positions.cpu(), prompt_prefixes(batch)
    lengths = batch.lengths.cpu()[positions]
    prefixes = None if prompts is None else PromptPrefixes(*(column[positions] for column in prompts))
    bins = bin_pack(lengths, cap, hidden, 1, sequences_per_example, prefixes)
    largest = torch.tensor([max(len(bins), 1)], device=batch.lengths.device)
    all_reduce(largest, role_groups.pg_collection.dp, dist.ReduceOp.MAX)
    count = -(-int(largest) // role.microbatch_multiple) * role.microbatch_multiple
    if count > len(bins):
        bins = bin_pack(lengths, cap, hidden, count, sequences_per_example, prefixes)
    microbatches = build_microbatches(batch, [positions[members] for members in bins], prompts)
    blank = blank_sequences(batch.present(), batch.lengths.device, sequences_per_example)
    return microbatches + [(blank, batch.lengths.new_zeros(0))] * (count - len(microbatches))


def write_back_rows(batch: Batch, name: str, results: list[tuple[Tensor, Tensor]]):
    """As `write_back`, of a row [H] per token, as bytes: [(values [T_m, H], positions of their sequences)]. One
    micro-batch at a time: all rows are large, and would be in memory twice."""
    width = results[0][0].shape[1] * results[0][0].element_size()
    field = torch.zeros(len(batch.tokens), width, dtype=torch.uint8, device=batch.tokens.device)
    for values, positions in results:
        if len(positions):
            field[batch.token_positions(positions)] = values.contiguous().view(torch.uint8)
    setattr(batch, name, field)


def write_back(batch: Batch, name: str, results: list[tuple[Tensor, Tensor]]):
    """Fills a per-token field from results of micro-batches: [(values [T_m], positions of their sequences)]."""
    field = torch.zeros(len(batch.tokens), dtype=FIELDS[name]["dtype"], device=batch.tokens.device)
    results = [(values, positions) for values, positions in results if len(positions)]  # without blank micro-batches
    if results:
        positions = torch.cat([positions for _, positions in results])
        field[batch.token_positions(positions)] = torch.cat([values for values, _ in results])
    setattr(batch, name, field)
