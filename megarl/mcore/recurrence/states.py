"""States of recurrent layers, the convolution before their rules, and rules by chunks: what kinds of layers share.

Shapes: T rows, C channels of the convolution, H heads with a memory [K, V] each.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megarl.mcore.recurrence.runs import NONE, Chunks, Runs


class States(NamedTuple):
    """States by number; fp32."""

    inputs: Tensor  # [S, taps − 1, C] the last inputs of the convolution
    memories: Tensor  # [S, H, K, V]

    @staticmethod
    def shapes(count: int, taps: int, sizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the fields; `sizes`: `HeadSizes` or `SpaceSizes`."""
        return (count, taps - 1, sizes.channels), (count, sizes.heads, sizes.keys, sizes.values)


def has_kernels(x: Tensor) -> bool:
    """Whether compiled kernels compute the rules on the device of a tensor."""
    return not x.is_cuda


def own_states(x: Tensor, sizes, runs: Runs) -> States:
    """Uninitialized states of the pass alone; arguments as of `States.shapes`."""
    return States(*map(x.new_empty, States.shapes(runs.states, runs.taps, sizes)))


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, runs: Runs, states: States | None, activates: bool = True
) -> Tensor:
    """[T, C] after the causal convolution, and its SiLU if it `activates`, of PyTorch's operations; `states` get its
    last inputs. `x`: [T, C]; `weight`: [C, 1, taps]; `bias`: [C]."""
    taps, plan = weight.squeeze(1).t(), runs.convolution
    padded = functional.pad(x, (0, 0, 0, 1))
    padded = padded if states is None else torch.cat([padded, states.inputs.flatten(0, 1)])
    total = sum(padded[rows] * tap for rows, tap in zip(plan.read, taps, strict=True))
    mixed = total if bias is None else total + bias
    mixed = functional.silu(mixed) if activates else mixed
    if states is not None and len(plan.states):
        states.inputs.index_copy_(0, plan.states, padded[plan.last])
    return mixed


def chunk_memories(zeros: Tensor, numbers: list[int], kept: dict[int, Tensor], states: States | None) -> Tensor:
    """[R, H, K, V] of the states with these numbers: those of `kept`, else of `states`; `NONE`: `zeros` [H, K, V]."""
    stored = None if states is None else states.memories
    found = (zeros if i == NONE else kept[i] if i in kept or stored is None else stored[i] for i in numbers)
    return torch.stack(list(found))


def store_memories(kept: dict[int, Tensor], states: States | None):
    """Writes the memories that the runs left, by the numbers of their states."""
    if states is not None and kept:
        numbers = torch.tensor(list(kept), device=states.memories.device)
        states.memories.index_copy_(0, numbers, torch.stack(list(kept.values())))


def decay_ratios(sums: Tensor) -> Tensor:
    """Sums […, C] of logarithms of decays up to each row of a chunk -> […, C, C] those between rows."""
    above = torch.ones(sums.shape[-1], sums.shape[-1], dtype=torch.bool, device=sums.device).triu(1)
    return (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(above, float("-inf")).exp()


def scan_chunks(steps_of: Callable, rows: Sequence[Tensor], zeros: Tensor, runs: Runs, states: States | None) -> Tensor:
    """[T, H, V]: what the rows read; `states` get the memories after the runs.

    Args:
        steps_of: How a rule goes through chunks of equal depth: what it reads of their rows, [M, H, C, …] and 0 in
            padding -> (which of the chunks, memories before them [n, H, K, V]) -> (results [n, H, C, V], memories).
        rows: What the rule reads of each row: tensors [T, H, …], of which those without channels get one.
        zeros: [H, K, V] the memory of a run that continues no state.
    """
    kept, found, places = dict[int, Tensor](), [], []  # memories by the number of the state; results and their rows
    wide = [x if x.dim() == 3 else x.unsqueeze(-1) for x in rows]
    for chunks in runs.chunks:
        step = steps_of(*(functional.pad(x, (0, 0, 0, 0, 0, 1))[chunks.rows].transpose(1, 2) for x in wide))
        memory = chunk_memories(zeros, chunks.before, kept, states)
        for at in chunks.steps:
            _keep_memories(kept, chunks, memory, len(at))
            out, memory = step(at, memory[: len(at)])
            found.append(out.transpose(1, 2).flatten(0, 1))
            places.append(chunks.rows[at].flatten())
        _keep_memories(kept, chunks, memory, 0)
    store_memories(kept, states)
    # Padding rows of chunks have the number T; those that count come first in the sorted order.
    return torch.cat(found)[torch.cat(places).argsort(stable=True)[: len(rows[0])]]


def _keep_memories(kept: dict[int, Tensor], chunks: Chunks, memory: Tensor, active: int):
    """Keeps the memories of the runs that have ended: those after the first `active` ones."""
    for i in range(active, len(memory)):
        if (number := chunks.after[i]) != NONE:
            kept[number] = memory[i]
