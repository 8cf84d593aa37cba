"""How a step's sequences fall into mini-batches and micro-batches: by sequence, never by placement.

Mini-batches are sets of sequence ids drawn from (seed, step, epoch), the same whatever the layout. Within one, each
lane packs its own sequences under a token cap that is a real cap; all lanes run the same number of micro-batches, and
a lane with nothing left runs an empty one that weighs nothing.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.batch import FIELDS, Batch
from megarl.rollout.random import stream_keys, uniforms

ORDER_STREAM = -1  # no prompt has this number: the shuffle shares no random number with any response


def minibatch_ids(count: int, size: int | None, seed: int, step: int, epoch: int) -> list[Tensor]:
    """Sequence ids 0 … count − 1 in random mini-batches of `size` (None: all in one), the last one may be smaller."""
    if size is None or size >= count:
        return [torch.arange(count)]
    stream = torch.full((count,), ORDER_STREAM, dtype=torch.int64)
    keys = stream_keys(seed, step, stream, torch.full_like(stream, epoch))
    order = uniforms(keys, torch.arange(count)).argsort(stable=True)
    return [part.sort().values for part in order.split(size)]


def members(batch: Batch, ids: Tensor) -> Tensor:
    """Places in the batch of the sequences with these ids."""
    return torch.isin(batch.sequence_ids, ids.to(batch.sequence_ids.device)).nonzero().flatten()


def pack(lengths: Tensor, cap: int) -> list[Tensor]:
    """Places of the sequences of each micro-batch: consecutive ones, at most `cap` tokens together.

    A sequence longer than the cap stands alone; programs refuse settings that allow one.
    """
    groups, current, tokens = [], [], 0
    for place, length in enumerate(lengths.tolist()):
        if current and tokens + length > cap:
            groups.append(current)
            current, tokens = [], 0
        current.append(place)
        tokens += length
    return [torch.tensor(group) for group in groups + [current] if group]


def nothing(fields: list[str], device) -> Batch:
    """A micro-batch of one token that counts nowhere: it keeps a lane without work in step with the others."""
    blank = {name: torch.zeros(1, dtype=FIELDS[name].dtype, device=device) for name in fields}
    return Batch(**{**blank, "lengths": torch.ones(1, dtype=torch.int64, device=device)})


def microbatches(batch: Batch, places: Tensor, cap: int, lanes_group) -> list[tuple[Batch, Tensor]]:
    """(micro-batch, places of its sequences in `batch`), equally many on every lane; empty ones have no places."""
    groups = [places[group] for group in pack(batch.lengths[places], cap)]
    most = torch.tensor([max(len(groups), 1)], device=batch.lengths.device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=lanes_group)
    parts = [(batch.select(group), group) for group in groups]
    spare = (nothing(batch.present(), batch.lengths.device), places[:0])
    return parts + [spare] * (int(most) - len(parts))


def write_back(batch: Batch, name: str, pieces: list[tuple[Tensor, Tensor]]):
    """Fills a per-token field from results of micro-batches: (values [T_m], places of their sequences)."""
    field = torch.zeros(len(batch.tokens), dtype=FIELDS[name].dtype, device=batch.tokens.device)
    index = Batch(lengths=batch.lengths, tokens=torch.arange(len(batch.tokens), device=field.device))
    for values, places in pieces:
        if len(places):
            field[index.select(places).tokens] = values
    setattr(batch, name, field)
