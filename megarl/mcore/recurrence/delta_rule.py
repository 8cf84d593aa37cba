"""The gated delta rule (2412.06464) with its convolution and gates, over the runs of a pass.

Each head keeps a state S [K, V]. A token with query q, key k, value v, decay d and strength β makes it
d·S + k ⊗ β·(v − kᵀ·d·S) and reads qᵀ·S. On a CPU compiled kernels do this token by token, in training, prefill and
decode alike, so that a token's bits depend on the tokens before it alone. The backward pass recomputes the results by
chunks of tokens (2406.06484 §3), which differ by rounding, and takes PyTorch's gradient of these.
Shapes: T rows, G groups with a key head of K channels, H value heads of V channels, C = 2·G·K + H·V channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megarl.mcore.kernels import native
from megarl.mcore.recurrence.runs import NONE, Chunks, Runs

EPSILON = 1e-6  # added to the squared length of queries and keys


class HeadSizes(NamedTuple):
    """Heads of a layer on one rank."""

    groups: int  # key heads
    heads: int  # value heads
    keys: int  # channels of a key
    values: int  # channels of a value

    @property
    def channels(self) -> int:
        """Channels of queries, keys and values together, which the convolution reads."""
        return 2 * self.groups * self.keys + self.heads * self.values

    @classmethod
    def of(cls, config, ranks: int) -> "HeadSizes":
        """Those of a model config's layers on one of some tensor-parallel ranks."""
        heads = config.linear_num_key_heads // ranks, config.linear_num_value_heads // ranks
        return cls(*heads, config.linear_key_head_dim, config.linear_value_head_dim)


class States(NamedTuple):
    """States by number; fp32."""

    inputs: Tensor  # [S, taps − 1, C] the last inputs of the convolution
    memories: Tensor  # [S, H, K, V]

    @staticmethod
    def shapes(count: int, taps: int, sizes: HeadSizes) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the fields."""
        return (count, taps - 1, sizes.channels), (count, sizes.heads, sizes.keys, sizes.values)


class Inputs(NamedTuple):
    """What a layer gives to the rule; fp32."""

    x: Tensor  # [T, C] queries, keys and values before the convolution
    a: Tensor  # [T, H] before the decay's softplus
    b: Tensor  # [T, H] before the strength's sigmoid
    weight: Tensor  # [C, 1, taps] of the convolution
    decay_logs: Tensor  # [H]
    biases: Tensor  # [H] added to a


def gated_delta_rule(inputs: Inputs, sizes: HeadSizes, runs: Runs, states: States | None = None) -> Tensor:
    """[T, H, V]: what each row reads; the runs change `states` in place. None: the runs name states of their own."""
    if states is None and torch.is_grad_enabled():
        return _TrainedRule.apply(sizes, runs, *inputs)
    return _by_token(inputs, sizes, runs, states)


def _by_token(inputs: Inputs, sizes: HeadSizes, runs: Runs, states: States | None) -> Tensor:
    taps = inputs.weight.shape[2]
    if states is None:
        states = States(*map(inputs.x.new_empty, States.shapes(runs.states, taps, sizes)))
    weight = inputs.weight.squeeze(1).t().contiguous()
    mixed = native.ops.causal_convolution(inputs.x, weight, runs.table, states.inputs)
    gates = native.ops.delta_rule_gates(inputs.a, inputs.b, inputs.decay_logs, inputs.biases)
    return native.ops.delta_rule(mixed, *gates, sizes.groups, sizes.keys, runs.table, states.memories)


class _TrainedRule(torch.autograd.Function):
    """Forward token by token, backward by chunks."""

    @staticmethod
    def forward(ctx, sizes, runs, *inputs):
        ctx.save_for_backward(*inputs)
        ctx.sizes, ctx.runs = sizes, runs
        return _by_token(Inputs(*inputs), sizes, runs, None)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        inputs = Inputs(*(x.detach().requires_grad_() for x in ctx.saved_tensors))
        with torch.enable_grad():
            out = by_chunks(inputs, ctx.sizes, ctx.runs)
        return None, None, *torch.autograd.grad(out, inputs, grad)


def by_chunks(inputs: Inputs, sizes: HeadSizes, runs: Runs) -> Tensor:
    """The same as `gated_delta_rule` up to rounding, of operations with gradients."""
    groups, heads, keys, values = sizes
    q, k, v = _convolved(inputs, runs).split((groups * keys, groups * keys, heads * values), 1)
    q, k = (x.unflatten(1, (groups, keys)) for x in (q, k))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    q, k = (x.repeat_interleave(heads // groups, 1) for x in (q * keys**-0.5, k))
    log_decays = -inputs.decay_logs.exp() * functional.softplus(inputs.a + inputs.biases)
    rows = [q, k, v.unflatten(1, (heads, values)), log_decays.unsqueeze(-1), inputs.b.sigmoid().unsqueeze(-1)]
    kept: dict[int, Tensor] = {}
    found, places = [], []
    for chunks in runs.chunks:
        out, order = _scan(rows, chunks, kept)
        found.append(out)
        places.append(order)
    # Padding rows of chunks have the number T; those that count come first in the sorted order.
    order = torch.cat(places).argsort(stable=True)[: len(inputs.x)]
    return torch.cat(found)[order]


def _convolved(inputs: Inputs, runs: Runs) -> Tensor:
    """[T, C] after the causal convolution and its SiLU."""
    padded = functional.pad(inputs.x, (0, 0, 0, 1))
    taps = inputs.weight.squeeze(1).t()
    previous = runs.previous_rows(len(taps)).to(inputs.x.device)
    return functional.silu(sum(padded[rows] * tap for rows, tap in zip(previous, taps, strict=True)))


def _scan(rows: list[Tensor], chunks: Chunks, kept: dict[int, Tensor]) -> tuple[Tensor, Tensor]:
    """Runs of equal depth: the results [M·C, H, V] of their chunks in the order of the scan, and whose rows these are
    [M·C]. Adds the states [H, K, V] that other runs continue to `kept`, and reads those that these continue.

    `rows`: queries, keys [T, H, K], values [T, H, V], logarithms of the decays and strengths [T, H, 1].
    """
    index = chunks.rows.to(rows[0].device)
    # [M, H, C, …]: padding rows have strength 0 and decay 1, and so change nothing.
    q, k, v, log_decays, strengths = (functional.pad(x, (0, 0, 0, 0, 0, 1))[index].transpose(1, 2) for x in rows)
    total = log_decays.squeeze(-1).cumsum(-1)
    above = torch.ones_like(total[0, 0].expand(total.shape[-1], -1), dtype=torch.bool).triu(1)
    ratios = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(above, float("-inf")).exp()
    scores, system = (q @ k.mT) * ratios, (k * strengths) @ k.mT * ratios
    solve = {"upper": False, "unitriangular": True}
    new = torch.linalg.solve_triangular(system, v * strengths, **solve)
    old = torch.linalg.solve_triangular(system, k * strengths * total.exp().unsqueeze(-1), **solve)
    q, k = q * total.exp().unsqueeze(-1), k * (total[..., -1:] - total).exp().unsqueeze(-1)
    decays = total[..., -1:, None].exp()

    starts = chunks.counts.cumsum(0) - chunks.counts
    zeros = v.new_zeros(q.shape[1], q.shape[3], v.shape[3])
    state = torch.stack([zeros if i == NONE else kept[i] for i in chunks.before.tolist()])
    found, order = [], []
    for step in range(int(chunks.counts[0])):
        active = int((chunks.counts > step).sum())
        _keep(kept, chunks, state, active)
        at, state = (starts[:active] + step).to(index.device), state[:active]
        change = new[at] - old[at] @ state
        found.append(q[at] @ state + scores[at] @ change)
        state = state * decays[at] + k[at].mT @ change
        order.append(index[at])
    _keep(kept, chunks, state, 0)
    return torch.cat(found).transpose(1, 2).flatten(0, 1), torch.cat(order).flatten()


def _keep(kept: dict[int, Tensor], chunks: Chunks, state: Tensor, active: int):
    """Keeps the states of the runs that have ended: those after the first `active` ones."""
    for i in range(active, len(state)):
        if (number := int(chunks.after[i])) != NONE:
            kept[number] = state[i]
