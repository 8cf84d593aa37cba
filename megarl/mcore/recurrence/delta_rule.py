"""The gated delta rule (2412.06464) with its convolution and gates, over the runs of a pass.

Each head keeps a state S [K, V]. A token with query q, key k, value v, decay d and strength β makes it
d·S + k ⊗ β·(v − kᵀ·d·S) and reads qᵀ·S. On a CPU compiled kernels do this token by token, in training, prefill and
decode alike, so that a token's bits depend on the tokens before it alone. On a device PyTorch's operations, or those of
`fused_chunks`, do it by chunks of tokens (2406.06484 §3), and in a decode step Triton kernels by token, which differ by
rounding. The backward pass computes everything again from the layer's inputs.
Shapes: T rows, G groups with a key head of K channels, H value heads of V channels, C = 2·G·K + H·V channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megarl.mcore.kernels import native
from megarl.mcore.recurrence import fused_chunks
from megarl.mcore.recurrence.rule import Rule, apply_rule
from megarl.mcore.recurrence.runs import AnyRuns, Chunks, Runs
from megarl.mcore.recurrence.states import (
    States,
    chunk_memories,
    convolved,
    keep_memories,
    scan_chunks,
)

EPSILON = 1e-6  # added to the squared length of queries and keys


class HeadSizes(NamedTuple):
    """Heads of a layer on one rank."""

    groups: int  # key heads
    heads: int  # value heads
    keys: int  # channels of a key
    values: int  # channels of a value
    fused_type: torch.dtype | None = None  # in which `fused_chunks` computes; None: PyTorch's operators, in fp32

    @property
    def channels(self) -> int:
        """Channels of queries, keys and values together, which the convolution reads."""
        return 2 * self.groups * self.keys + self.heads * self.values

    @property
    def parts(self) -> dict[str, int]:
        """Rows of the layer's first projection by part, in their order; the convolution reads the first three."""
        keys, values = self.groups * self.keys, self.heads * self.values
        return {"query": keys, "key": keys, "value": values, "z": values, "beta": self.heads, "alpha": self.heads}

    @classmethod
    def of(cls, config, ranks: int) -> "HeadSizes":
        """Those of a model config's layers on one of some tensor-parallel ranks."""
        heads = config.linear_num_key_heads // ranks, config.linear_num_value_heads // ranks
        fused_type = config.params_dtype if config.delta_rule_backend == fused_chunks.BACKEND else None
        return cls(*heads, config.linear_key_head_dim, config.linear_value_head_dim, fused_type)


class Inputs(NamedTuple):
    """What a layer gives to the rule; fp32."""

    x: Tensor  # [T, C] queries, keys and values before the convolution
    a: Tensor  # [T, H] before the decay's softplus
    b: Tensor  # [T, H] before the strength's sigmoid
    weight: Tensor  # [C, 1, taps] of the convolution
    decay_logs: Tensor  # [H]
    biases: Tensor  # [H] added to a

    def at(self, rows: Tensor) -> "Inputs":
        return self._replace(x=self.x[rows], a=self.a[rows], b=self.b[rows])

    def apply(self, sizes, runs: Runs, states: States) -> Tensor:
        return gated_delta_rule(self, sizes, runs, states)


def gated_delta_rule(inputs: Inputs, sizes: HeadSizes, runs: AnyRuns, states: States | None = None) -> Tensor:
    """[T, H, V]: what each row reads; the runs change `states` in place. None: the runs name states of their own."""
    return apply_rule(_RULE, inputs, sizes, runs, states)


def _by_token(inputs: Inputs, sizes: HeadSizes, runs: Runs, states: States) -> Tensor:
    weight = inputs.weight.squeeze(1).t().contiguous()
    mixed = native.ops.causal_convolution(inputs.x, weight, None, runs.table, states.inputs)
    gates = native.ops.delta_rule_gates(inputs.a, inputs.b, inputs.decay_logs, inputs.biases)
    return native.ops.delta_rule(mixed, *gates, sizes.groups, sizes.keys, runs.table, states.memories)


def _token_gradients(grad: Tensor, inputs: Inputs, sizes: HeadSizes, runs: Runs, memories: Tensor):
    """Convolved rows, logarithms of decays, and strengths, and their gradients, token by token."""
    results = convolved(inputs.x, inputs.weight, None, runs, None), *_gates(inputs)
    mixed, log_decays, strengths = (each.detach() for each in results)
    decays = log_decays.exp()
    rule = native.ops.delta_rule_backward
    of_mixed, of_decays, of_strengths = rule(
        grad.contiguous(), mixed, decays, strengths, sizes.groups, sizes.keys, runs.table, memories
    )
    return results, (of_mixed, of_decays * decays, of_strengths)


def _gates(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Logarithms of the decays, and strengths, both [T, H]."""
    return -inputs.decay_logs.exp() * functional.softplus(inputs.a + inputs.biases), inputs.b.sigmoid()


class _Rows(NamedTuple):
    """What the rule reads of each row."""

    queries: Tensor  # [T, H, K]
    keys: Tensor  # [T, H, K]
    values: Tensor  # [T, H, V]
    log_decays: Tensor  # [T, H]
    strengths: Tensor  # [T, H]


def by_chunks(inputs: Inputs, sizes: HeadSizes, runs: Runs, states: States | None = None) -> Tensor:
    """The same as `gated_delta_rule` up to rounding, with operations that have gradients without `states`."""
    groups, heads, keys, values, fused_type = sizes
    if fused_type is None:
        mixed = convolved(inputs.x, inputs.weight, None, runs, states)
    else:
        mixed = fused_chunks.convolved(inputs.x, inputs.weight, fused_type, runs, states)
    q, k, v = mixed.split((groups * keys, groups * keys, heads * values), 1)
    q, k, v = q.unflatten(1, (groups, keys)), k.unflatten(1, (groups, keys)), v.unflatten(1, (heads, values))
    if fused_type is not None:
        return fused_chunks.scan(q, k, v, *_gates(inputs), runs, states)
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    q, k = (x.repeat_interleave(heads // groups, 1) for x in (q * keys**-0.5, k))
    return scan_chunks(_scan, _Rows(q, k, v, *_gates(inputs)), runs, states)


def _scan(rows: _Rows, chunks: Chunks, kept: dict[int, Tensor], states: States | None) -> list[tuple[Tensor, Tensor]]:
    """Runs of equal depth: of each step the results [n·C, H, V] of its chunks, and whose rows these are [n·C].

    Adds the memories [H, K, V] that other runs continue to `kept`, and reads those that these continue.
    """
    # [M, H, C, …]: padding rows have strength 0 and decay 1, and so change nothing.
    wide = [*rows[:3], *(x.unsqueeze(-1) for x in rows[3:])]
    q, k, v, log_decays, strengths = (functional.pad(x, (0, 0, 0, 0, 0, 1))[chunks.rows].transpose(1, 2) for x in wide)
    total = log_decays.squeeze(-1).cumsum(-1)
    above = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    ratios = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(above, float("-inf")).exp()
    scores, system = (q @ k.mT) * ratios, (k * strengths) @ k.mT * ratios
    solve = {"upper": False, "unitriangular": True}
    new = torch.linalg.solve_triangular(system, v * strengths, **solve)
    old = torch.linalg.solve_triangular(system, k * strengths * total.exp().unsqueeze(-1), **solve)
    q, k = q * total.exp().unsqueeze(-1), k * (total[..., -1:] - total).exp().unsqueeze(-1)
    decays = total[..., -1:, None].exp()
    zeros = rows.values.new_zeros(*rows.keys.shape[1:], rows.values.shape[-1])
    found, memory = [], chunk_memories(zeros, chunks.before, kept, states)
    for at in chunks.steps:
        keep_memories(kept, chunks, memory, len(at))
        memory = memory[: len(at)]
        change = new[at] - old[at] @ memory
        out = q[at] @ memory + scores[at] @ change
        found.append((out.transpose(1, 2).flatten(0, 1), chunks.rows[at].flatten()))
        memory = memory * decays[at] + k[at].mT @ change
    keep_memories(kept, chunks, memory, 0)
    return found


def one_token(inputs: Inputs, sizes: HeadSizes, numbers: Tensor, states: States) -> Tensor:
    """A decode step on CUDA: one row of each state. `numbers` [T]: of the states; rows of padding read anything."""
    from megarl.mcore.kernels.cuda.recurrent_rows import convolve_rows, delta_rows  # needs Triton

    mixed = inputs.x.new_empty(inputs.x.shape)
    convolve_rows(inputs.x, inputs.weight, None, numbers, states.inputs, mixed)
    read = mixed.new_empty(len(mixed), sizes.heads, sizes.values)
    gates = inputs.a, inputs.b, inputs.decay_logs, inputs.biases
    delta_rows(mixed, *gates, numbers, states.memories, read, sizes.groups, EPSILON)
    return read


_RULE = Rule(_by_token, one_token, by_chunks, _token_gradients)
