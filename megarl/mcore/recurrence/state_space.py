"""Mamba-2's state space (2405.21060) with its convolution and steps, over the runs of a pass.

Each head keeps a state S [N, P]. A token with channels x [P], step Δ, and its group's input and output vectors B, C [N]
makes it e^(−e^A·Δ)·S + B ⊗ Δ·x and reads Cᵀ·S + D·x. On a CPU compiled kernels do this token by token, in training,
prefill and decode alike, so that a token's bits depend on the tokens before it alone. On a device PyTorch's operations
do it by chunks of tokens (§6), and in a decode step Triton kernels by token, which differ by rounding. The backward
pass computes everything again from the layer's inputs.
Shapes: T rows, G groups of N numbers, H heads of P channels, C = H·P + 2·G·N channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megarl.mcore.kernels import native
from megarl.mcore.recurrence.rule import Rule, apply_rule
from megarl.mcore.recurrence.runs import AnyRuns, Chunks, Runs
from megarl.mcore.recurrence.states import (
    States,
    chunk_memories,
    convolved,
    keep_memories,
    scan_chunks,
)

CONVOLVED = ("x", "B", "C")  # parts of a layer's first projection that the convolution reads


class SpaceSizes(NamedTuple):
    """Heads of a layer on one rank."""

    groups: int  # that share B and C
    heads: int
    keys: int  # N numbers of B, and of C
    values: int  # P channels of a head
    min_step: float = 0.0  # of Δ

    @property
    def channels(self) -> int:
        """Channels of x, B and C together, which the convolution reads."""
        return self.heads * self.values + 2 * self.groups * self.keys

    @property
    def parts(self) -> dict[str, int]:
        """Rows of the layer's first projection by part, in their order; the convolution reads x, B and C."""
        values, keys = self.heads * self.values, self.groups * self.keys
        return {"z": values, "x": values, "B": keys, "C": keys, "dt": self.heads}


class SpaceInputs(NamedTuple):
    """What a layer gives to the state space; fp32."""

    x: Tensor  # [T, C] x, B and C before the convolution
    steps: Tensor  # [T, H] before the softplus
    weight: Tensor  # [C, 1, taps] of the convolution
    bias: Tensor  # [C] of the convolution
    decay_logs: Tensor  # [H] A
    biases: Tensor  # [H] added to the steps
    skips: Tensor  # [H] D

    def at(self, rows: Tensor) -> "SpaceInputs":
        return self._replace(x=self.x[rows], steps=self.steps[rows])

    def apply(self, sizes, runs: Runs, states: States) -> Tensor:
        return state_space(self, sizes, runs, states)


def state_space(inputs: SpaceInputs, sizes: SpaceSizes, runs: AnyRuns, states: States | None = None) -> Tensor:
    """[T, H, P]: what each row reads; the runs change `states` in place. None: the runs name states of their own."""
    return apply_rule(_RULE, inputs, sizes, runs, states)


def _by_token(inputs: SpaceInputs, sizes: SpaceSizes, runs: Runs, states: States) -> Tensor:
    weight = inputs.weight.squeeze(1).t().contiguous()
    mixed = native.ops.causal_convolution(inputs.x, weight, inputs.bias, runs.table, states.inputs)
    gates = native.ops.state_space_gates(inputs.steps, inputs.decay_logs, inputs.biases, sizes.min_step)
    return native.ops.state_space(mixed, *gates, inputs.skips, sizes.groups, sizes.keys, runs.table, states.memories)


def _token_gradients(grad: Tensor, inputs: SpaceInputs, sizes: SpaceSizes, runs: Runs, memories: Tensor):
    """Convolved rows, steps, logarithms of decays, and skips, and their gradients, token by token."""
    whole = convolved(inputs.x, inputs.weight, inputs.bias, runs, None)
    results = whole, *_gates(inputs, sizes), _heads_of(whole, sizes) * inputs.skips[:, None]
    mixed, steps, log_decays = (each.detach() for each in results[:3])
    decays = log_decays.exp()
    of_mixed, of_steps, of_decays = native.ops.state_space_backward(
        grad.contiguous(), mixed.contiguous(), steps, decays, sizes.groups, sizes.keys, runs.table, memories
    )
    return results, (of_mixed, of_steps, of_decays * decays, grad)


def _gates(inputs: SpaceInputs, sizes: SpaceSizes) -> tuple[Tensor, Tensor]:
    """Δ and logarithms of the decays, both [T, H]."""
    steps = functional.softplus(inputs.steps + inputs.biases).clamp_min(sizes.min_step)
    return steps, -inputs.decay_logs.exp() * steps


def _heads_of(mixed: Tensor, sizes: SpaceSizes) -> Tensor:
    """[T, C] -> x [T, H, P]."""
    return mixed[:, : sizes.heads * sizes.values].unflatten(1, (sizes.heads, sizes.values))


class _Rows(NamedTuple):
    """What the state space reads of each row."""

    outputs: Tensor  # [T, H, N] C
    inputs: Tensor  # [T, H, N] B
    changes: Tensor  # [T, H, P] Δ·x
    log_decays: Tensor  # [T, H]
    skipped: Tensor  # [T, H, P] D·x


def _rows(inputs: SpaceInputs, sizes: SpaceSizes, runs: Runs, states: States | None) -> _Rows:
    """Convolution and steps; `states` get the last inputs of the convolution."""
    groups, heads, keys = sizes[:3]
    mixed = convolved(inputs.x, inputs.weight, inputs.bias, runs, states)
    x = _heads_of(mixed, sizes)
    b, c = mixed[:, heads * sizes.values :].unflatten(1, (2, groups, keys)).unbind(1)
    b, c = (vectors.repeat_interleave(heads // groups, 1) for vectors in (b, c))
    steps, log_decays = _gates(inputs, sizes)
    return _Rows(c, b, x * steps.unsqueeze(-1), log_decays, x * inputs.skips[:, None])


def by_chunks(inputs: SpaceInputs, sizes: SpaceSizes, runs: Runs, states: States | None = None) -> Tensor:
    """The same as `state_space` up to rounding, of PyTorch's operations, which have gradients without `states`."""
    rows = _rows(inputs, sizes, runs, states)
    return scan_chunks(_scan, rows, runs, states) + rows.skipped


def _scan(rows: _Rows, chunks: Chunks, kept: dict[int, Tensor], states: States | None) -> list[tuple[Tensor, Tensor]]:
    """Runs of equal depth: of each step the results [n·C, H, P] of its chunks, and whose rows these are [n·C].

    Adds the memories [H, N, P] that other runs continue to `kept`, and reads those that these continue.
    """
    # [M, H, C, …]: padding rows have B = 0 and decay 1, and so change nothing.
    wide = [*rows[:3], rows.log_decays.unsqueeze(-1)]
    c, b, changes, logs = (functional.pad(x, (0, 0, 0, 0, 0, 1))[chunks.rows].transpose(1, 2) for x in wide)
    total = logs.squeeze(-1).cumsum(-1)
    above = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    ratios = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(above, float("-inf")).exp()
    own = (c @ b.mT) * ratios @ changes
    c, b = c * total.exp().unsqueeze(-1), b * (total[..., -1:] - total).exp().unsqueeze(-1)
    added, decays = b.mT @ changes, total[..., -1:, None].exp()
    zeros = rows.changes.new_zeros(*rows.inputs.shape[1:], rows.changes.shape[-1])
    found, memory = [], chunk_memories(zeros, chunks.before, kept, states)
    for at in chunks.steps:
        keep_memories(kept, chunks, memory, len(at))
        memory = memory[: len(at)]
        found.append(((own[at] + c[at] @ memory).transpose(1, 2).flatten(0, 1), chunks.rows[at].flatten()))
        memory = memory * decays[at] + added[at]
    keep_memories(kept, chunks, memory, 0)
    return found


def one_token(inputs: SpaceInputs, sizes: SpaceSizes, numbers: Tensor, states: States) -> Tensor:
    """A decode step on CUDA: one row of each state. `numbers` [T]: of the states; rows of padding read anything."""
    from megarl.mcore.kernels.cuda.recurrent_rows import convolve_rows, space_rows  # needs Triton

    mixed = inputs.x.new_empty(inputs.x.shape)
    convolve_rows(inputs.x, inputs.weight, inputs.bias, numbers, states.inputs, mixed)
    read = mixed.new_empty(len(mixed), sizes.heads, sizes.values)
    gates = inputs.steps, inputs.decay_logs, inputs.biases, inputs.skips
    space_rows(mixed, *gates, numbers, states.memories, read, sizes.groups, sizes.min_step)
    return read


_RULE = Rule(_by_token, one_token, by_chunks, _token_gradients)
