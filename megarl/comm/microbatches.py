"""How a step's sequences fall into mini-batches and micro-batches: by sequence, never by placement.

Mini-batches are sets of sequence ids drawn from (seed, step, epoch), the same whatever the layout. Within one, each
lane packs its own sequences under a token cap that is a real cap, few micro-batches of about equal work; all lanes run
the same number of micro-batches, and a lane with nothing left runs an empty one that weighs nothing.

Responses to the same prompt stand in the same micro-batch where they can: dense models compute what they begin with
once. The cap counts it for each of them, so that memory is what it would be without.
"""

import bisect
import heapq
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.counter_rng import stream_keys, uniforms
from megarl.arguments import RoleSettings, Settings
from megarl.batch import FIELDS, Batch, HostMetadata, SharedPrefix, expand_ranges
from megarl.comm.role_mesh import RoleGroups
from megarl.mcore import device

ORDER_STREAM = -1  # no prompt has this number: the shuffle shares no random number with any response


def minibatch_ids(count: int, size: int | None, seed: int, step: int, epoch: int) -> list[Tensor]:
    """Sequence ids 0 … count − 1 in random mini-batches of `size` (None: all in one), the last one may be smaller."""
    if size is None or size >= count:
        return [torch.arange(count)]
    stream = torch.full((count,), ORDER_STREAM, dtype=torch.int64)
    keys = stream_keys(seed, step, stream, torch.full_like(stream, epoch))
    order = uniforms(keys, torch.arange(count)).argsort(stable=True)
    return [part.sort().values for part in order.split(size)]


def minibatches_of_step(settings: Settings, count: int, step: int, epoch: int) -> list[Tensor]:
    """The mini-batches of the `count` sequences of a step, as `minibatch_ids` draws them."""
    return minibatch_ids(count, settings.minibatch_size, settings.seed, step, epoch)


def positions_of(batch: Batch, ids: Tensor) -> Tensor:
    """Places in the batch of the sequences with these ids."""
    return torch.isin(batch.sequence_ids, ids.to(batch.sequence_ids.device)).nonzero().flatten()


def sequence_flops(lengths: Tensor, hidden: int) -> Tensor:
    """[N] int64 work of sequences of these lengths: s² + 12·hidden·s, in units of 2·hidden operations.

    In a layer, causal attention lets each token meet half of its sequence, once for the scores and once for the
    values: 2·hidden·s² operations. The linear layers hold 12·hidden² weights (4 in attention, 8 in the MLP):
    24·hidden²·s operations. Only the ratio counts. In int32 the square alone overflows at 46,341 tokens.
    """
    lengths = lengths.to(torch.int64)
    return lengths * (lengths + 12 * hidden)


class PromptPrefixes(NamedTuple):
    """What sequences begin with; both [N] int64, on the host."""

    ids: Tensor  # equal where the prompt is
    shared: Tensor  # tokens of it that one sequence may hold for all


def bin_pack(
    lengths: Tensor,
    cap: int,
    hidden: int,
    count: int = 1,
    sequences_per_example: int = 1,
    prompts: PromptPrefixes | None = None,
) -> list[Tensor]:
    """Places of the sequences of each micro-batch, ascending; at most `cap` tokens each, the dearest one first.

    As few micro-batches as best-fit decreasing finds, or `count` of them where that is more and there are sequences
    enough; then levelled to about equal work. A sequence longer than the cap stands alone; programs refuse settings
    that allow one. `sequences_per_example` sequences behind each other, as the two of a pair, share a micro-batch: then all of this
    is said of them. So do those behind each other that have a prompt in common, as far as the cap and `count` allow;
    its work counts once for each such run.
    """
    if not len(lengths):
        return []
    ids = None if prompts is None else prompts.ids[::sequences_per_example].tolist()
    starts = sequences_per_example * np.array(
        _run_starts(lengths.view(-1, sequences_per_example).sum(1).tolist(), cap, count, ids)
    )
    work, spared = sequence_flops(lengths, hidden).numpy(), np.zeros(len(lengths), np.int64)
    if prompts is not None:
        spared = 12 * hidden * prompts.shared.numpy()
    tokens, costs = np.add.reduceat(lengths.numpy(), starts), np.add.reduceat(work - spared, starts) + spared[starts]
    runs = np.split(np.arange(len(lengths)), starts[1:])
    groups = _bin_pack_runs(tokens.tolist(), costs.tolist(), cap, count)
    return [torch.from_numpy(np.concatenate([runs[run] for run in group])) for group in groups]


def _run_starts(lengths: list[int], cap: int, count: int, ids: list[int] | None) -> list[int]:
    """Ascending places where runs begin of what has the same number behind each other, together under the cap.

    At least `count` of them, if there can be. None: each is a run.
    """
    if ids is None:
        return list(range(len(lengths)))
    starts, tokens = [], cap
    for place, length in enumerate(lengths):
        tokens += length
        if not place or ids[place] != ids[place - 1] or tokens > cap:
            starts.append(place)
            tokens = length
    while len(starts) < min(count, len(lengths)):  # the longest one becomes two
        ends = [*starts[1:], len(lengths)]
        longest = max(range(len(starts)), key=lambda run: ends[run] - starts[run])
        starts.insert(longest + 1, (starts[longest] + ends[longest]) // 2)
    return starts


def _bin_pack_runs(lengths: list[int], costs: list[int], cap: int, count: int) -> list[list[int]]:
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    groups = _best_fit(order, lengths, cap)
    groups = _balance(order, lengths, costs, cap, max(count, len(groups))) or groups
    return sorted((sorted(group) for group in groups if group), key=lambda g: (-sum(costs[i] for i in g), g))


def _best_fit(order: list[int], lengths: list[int], cap: int) -> list[list[int]]:
    """Longest first, each into the fullest micro-batch that has room: at most 11/9 of the fewest (Johnson 1973)."""
    groups, rooms = [], []  # rooms: (tokens left, micro-batch), ascending
    for place in order:
        found = bisect.bisect_left(rooms, (lengths[place], -1))
        if found == len(rooms):
            groups.append([])
            rooms.append((cap, len(groups) - 1))
        room, group = rooms.pop(found)
        groups[group].append(place)
        bisect.insort(rooms, (room - lengths[place], group))
    return groups


def _balance(order: list[int], lengths: list[int], costs: list[int], cap: int, count: int) -> list[list[int]] | None:
    """Dearest first, each into the micro-batch with the least work that has room; None where one finds no room."""
    groups = [[] for _ in range(count)]
    heap = [(0, 0, group) for group in range(count)]  # (work, tokens, micro-batch)
    for place in order:
        full = []
        while heap and heap[0][1] + lengths[place] > cap:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        work, tokens, group = heap[0]
        heapq.heapreplace(heap, (work + costs[place], tokens + lengths[place], group))
        groups[group].append(place)
        for entry in full:
            heapq.heappush(heap, entry)
    return groups


def blank_sequences(fields: list[str], device, sequences: int = 1) -> Batch:
    """Sequences of one token that count nowhere: they keep a lane without work in step with the others."""
    blank = {name: torch.zeros(sequences, dtype=FIELDS[name].dtype, device=device) for name in fields}
    found = Batch(**{**blank, "lengths": torch.ones(sequences, dtype=torch.int64, device=device)})
    found.host_metadata = HostMetadata(
        torch.ones(sequences, dtype=torch.int64), torch.zeros(sequences, dtype=torch.bool)
    )
    return found


def build_microbatches(
    batch: Batch, groups: list[Tensor], prompts: PromptPrefixes | None = None
) -> list[tuple[Batch, Tensor]]:
    """The micro-batches of sequences at these places, on the host; what the host must know, it asks for once.

    `prompts`: of the batch's sequences; None: nothing is shared.

    Raises:
        RuntimeError: sequences with the same prompt, by its number, begin with other tokens.
    """
    lengths, mask = batch.lengths.cpu(), batch.response_mask
    mask = None if mask is None else mask.cpu()
    starts, found = lengths.cumsum(0) - lengths, []
    for group in groups:
        rows = expand_ranges(starts[group], lengths[group])
        places, tokens = device.send([group.numpy(), rows.numpy()])
        part = batch.take(places, tokens)
        shared = None if prompts is None else _shared_prefix(prompts.ids[group].numpy(), prompts.shared[group])
        part.host_metadata = HostMetadata(lengths[group], None if mask is None else mask[rows], shared)
        found.append((part, places))
    _check_shared_prefixes([part for part, _ in found])
    return found


def _check_shared_prefixes(parts: list[Batch]):
    unlike = []
    for part in parts:
        if (shared := part.host_metadata.shared) is not None:
            starts = part.host_metadata.lengths.cumsum(0) - part.host_metadata.lengths
            own, holders = (expand_ranges(where, shared.tokens) for where in (starts, starts[shared.holders]))
            own, holders = device.send([own.numpy(), holders.numpy()])
            unlike.append((part.tokens[own] != part.tokens[holders]).sum())
    if unlike and int(count := torch.stack(unlike).sum()):
        raise RuntimeError(f"{int(count)} tokens of prompts differ between sequences whose prompt has the same number")


def _shared_prefix(ids: np.ndarray, tokens: Tensor) -> SharedPrefix | None:
    """The first sequence of each prompt holds it for the others; None where each has another."""
    _, first, prompt = np.unique(ids, return_index=True, return_inverse=True)
    holders = torch.from_numpy(first[prompt])
    tokens = tokens.masked_fill(holders == torch.arange(len(holders)), 0)
    return SharedPrefix(holders, tokens) if bool(tokens.any()) else None


def prompt_prefixes(batch: Batch) -> PromptPrefixes | None:
    """Of a batch that tells its sequences' prompts. A prompt's last token, whose successor is each one's own, is not
    shared."""
    if batch.prompt_ids is None or batch.prompt_lengths is None:
        return None
    return PromptPrefixes(batch.prompt_ids.cpu(), (batch.prompt_lengths.cpu() - 1).clamp_(min=0))


def split_into_microbatches(
    batch: Batch, places: Tensor, cap: int, dp_group, hidden: int, multiple: int = 1, sequences_per_example: int = 1,
    prompts: PromptPrefixes | None = None,
) -> list[tuple[Batch, Tensor]]:  # fmt: skip
    """(micro-batch, places of its sequences in `batch`), equally many on every lane; empty ones have no places.

    Args:
        places: [N] ascending, the sequences to pack.
        cap: most tokens of a micro-batch.
        dp_group: this rank and its like on the other lanes; a collective of the group.
        hidden: the model's hidden size, which weighs attention against linear layers.
        multiple: what the number of micro-batches must be a multiple of (the pipeline's size with virtual stages).
        sequences_per_example: so many sequences behind each other share a micro-batch, as in `pack`.
        prompts: of the batch's sequences, to be computed once where they stand in a micro-batch.
    """
    where, places = batch.lengths.device, places.cpu()
    lengths = batch.lengths.cpu()[places]
    of_places = None if prompts is None else PromptPrefixes(*(each[places] for each in prompts))
    packed = bin_pack(lengths, cap, hidden, 1, sequences_per_example, of_places)
    most = torch.tensor([max(len(packed), 1)], device=where)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=dp_group)
    count = -(-int(most) // multiple) * multiple
    packed = bin_pack(lengths, cap, hidden, count, sequences_per_example, of_places) if count > len(packed) else packed
    parts = build_microbatches(batch, [places[group] for group in packed], prompts)
    spare = (blank_sequences(batch.present(), where, sequences_per_example), places[:0].to(where))
    return parts + [spare] * (count - len(parts))


def role_microbatches(
    batch: Batch, places: Tensor, role: RoleSettings, role_groups: RoleGroups, sequences_per_example: int = 1
) -> list[tuple[Batch, Tensor]]:
    """`microbatches` for a role's model, under its cap, as many as on each of its lanes.

    A model with experts computes each prompt for each response: what balances experts counts every token.
    """
    cap, args = role.max_tokens_per_microbatch, role.megatron
    return split_into_microbatches(
        batch, places, cap, role_groups.pg_collection.dp, args.hidden_size, role.microbatch_multiple, sequences_per_example,
        None if args.num_experts else prompt_prefixes(batch),
    )  # fmt: skip


def write_back(batch: Batch, name: str, pieces: list[tuple[Tensor, Tensor]]):
    """Fills a per-token field from results of micro-batches: (values [T_m], places of their sequences)."""
    field = torch.zeros(len(batch.tokens), dtype=FIELDS[name].dtype, device=batch.tokens.device)
    pieces = [(values, places) for values, places in pieces if len(places)]
    if pieces:
        values, places = map(torch.cat, zip(*pieces, strict=True))
        field[batch.token_places(places)] = values
    setattr(batch, name, field)
