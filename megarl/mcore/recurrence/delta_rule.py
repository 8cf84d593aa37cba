"""The gated delta rule (2412.06464) with its convolution and gates, over the runs of a pass.

Each head keeps a state S [K, V]. A token with query q, key k, value v, decay d and strength β makes it
d·S + k ⊗ β·(v − kᵀ·d·S) and reads qᵀ·S. In Kimi delta attention (2510.26692) d is a vector [K], which multiplies rows
of S. On a CPU compiled kernels do this token by token, in training, prefill and
decode alike, so that a token's bits depend on the tokens before it alone. On a device PyTorch's operations, or those of
`fused_chunks`, do it by chunks of tokens (2406.06484 §3), and in a decode step Triton kernels by token, which differ by
rounding. The backward pass computes everything again from the layer's inputs.
Shapes: T rows, G groups with a key head of K channels, H value heads of V channels, D decays of a head (1 or K),
C = 2·G·K + H·V channels.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megarl.mcore.kernels import native
from megarl.mcore.recurrence import fused_chunks
from megarl.mcore.recurrence.runs import Runs, States, convolved, decay_ratios, scan_chunks

EPSILON = 1e-6  # added to the squared length of queries and keys
DECAY_BLOCK = 16  # rows of a chunk between which ratios of decays by channel are computed one by one


class HeadSizes(NamedTuple):
    """Heads of a layer on one rank."""

    groups: int  # key heads
    heads: int  # value heads
    keys: int  # channels of a key
    values: int  # channels of a value
    fused_type: torch.dtype | None = None  # in which `fused_chunks` computes; None: PyTorch's operators, in fp32
    decays: int = 1  # of a head: 1, or one for each channel of its key
    bound: float | None = None  # of logarithms of decays by channel; None: none but 0
    gate_rank: int = 0  # channels of the latents of decays and output gates; 0: both come from hidden states

    @property
    def channels(self) -> int:
        """Channels of queries, keys and values together, which the convolution reads."""
        return 2 * self.groups * self.keys + self.heads * self.values

    @property
    def normed(self) -> tuple[int, int, float]:
        """Heads of queries and keys, as of `runs.normed`."""
        return 2 * self.groups, self.keys, EPSILON

    @property
    def wide(self) -> dict[str, int]:
        """Channels that a layer computes with, by part, in their order; the convolution reads the first three."""
        keys, values, heads = self.groups * self.keys, self.heads * self.values, self.heads
        return {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads * self.decays}

    @property
    def parts(self) -> dict[str, int]:
        """Rows of the layer's first projection by part, in their order: all of `wide` but `latents`."""
        return {part: rows for part, rows in self.wide.items() if part not in self.latents}

    @property
    def latents(self) -> tuple[str, ...]:
        """Parts that come from latents, each by a projection of its own: output gates, then decays; or none."""
        return ("z", "alpha") if self.gate_rank else ()

    @classmethod
    def of(cls, config, ranks: int) -> "HeadSizes":
        """Those of a model config's layers on one of some tensor-parallel ranks."""
        groups, heads = config.linear_num_key_heads // ranks, config.linear_num_value_heads // ranks
        fused_type = config.params_dtype if config.delta_rule_backend == fused_chunks.BACKEND else None
        keys, values = config.linear_key_head_dim, config.linear_value_head_dim
        decays, rank = keys if config.linear_channel_decay else 1, config.linear_gate_rank or 0
        return cls(groups, heads, keys, values, fused_type, decays, config.linear_decay_bound, rank)


class Inputs(NamedTuple):
    """What a layer gives to the rule; fp32."""

    x: Tensor  # [T, C] queries, keys and values before the convolution
    a: Tensor  # [T, H·D] before the decay's softplus
    b: Tensor  # [T, H] before the strength's sigmoid
    weight: Tensor  # [C, 1, taps] of the convolution
    decay_logs: Tensor  # [H]
    biases: Tensor  # [H·D] added to a

    def at(self, rows: Tensor) -> "Inputs":
        return self._replace(x=self.x[rows], a=self.a[rows], b=self.b[rows])

    def by_token(self, sizes: HeadSizes, runs: Runs, states: States) -> Tensor:
        """[T, H, V]: what each row reads, by compiled kernels; the runs change `states` in place."""
        weight = self.weight.squeeze(1).t().contiguous()
        mixed = native.ops.causal_convolution(self.x, weight, None, runs.table, states.inputs)
        decays, strengths = native.ops.delta_rule_gates(self.a, self.b, self.decay_logs, self.biases, sizes.bound)
        return native.ops.delta_rule(mixed, decays, strengths, sizes.groups, sizes.keys, runs.table, states.memories)

    def token_gradients(self, grad: Tensor, sizes: HeadSizes, runs: Runs, memories: Tensor):
        """Backward of `by_token`, from the gradient of what rows read and the memories of the pass: convolved rows,
        logarithms of decays, and strengths, of PyTorch's operations, and their gradients."""
        results = convolved(self.x, self.weight, None, runs, None), *self._gates(sizes)
        mixed, log_decays, strengths = (each.detach() for each in results)
        decays = log_decays.exp()
        of_mixed, of_decays, of_strengths = native.ops.delta_rule_backward(
            grad.contiguous(), mixed, decays, strengths, sizes.groups, sizes.keys, runs.table, memories
        )
        return results, (of_mixed, of_decays * decays, of_strengths)

    def by_chunks(self, sizes: HeadSizes, runs: Runs, states: States | None = None) -> Tensor:
        """As `by_token` up to rounding, with operations that have gradients without `states`."""
        if sizes.fused_type is None:
            mixed = convolved(self.x, self.weight, None, runs, states, heads=sizes.normed)
            return scan(mixed, *self._gates(sizes), sizes, runs, states)
        mixed = fused_chunks.convolved(self.x, self.weight, sizes.fused_type, runs, states)
        return fused_chunks.scan(*_heads_of(mixed, sizes), *self._gates(sizes), runs, states)

    def one_token(self, sizes: HeadSizes, numbers: Tensor, states: States) -> Tensor:
        """A decode step on CUDA: one row of each state. `numbers` [T]: of the states; rows of padding read anything."""
        from megarl.mcore.kernels.cuda.recurrent_rows import convolve_rows, delta_rows  # needs Triton

        mixed = self.x.new_empty(self.x.shape)
        convolve_rows(self.x, self.weight, None, numbers, states.inputs, mixed)
        read = mixed.new_empty(len(mixed), sizes.heads, sizes.values)
        gates = [self.a, self.b, self.decay_logs, self.biases]
        delta_rows(mixed, gates, numbers, states.memories, read, sizes.groups, EPSILON, sizes.bound)
        return read

    def _gates(self, sizes: HeadSizes) -> tuple[Tensor, Tensor]:
        """Logarithms of the decays [T, H·D], and strengths [T, H]."""
        rates, before = self.decay_logs.exp(), self.a + self.biases
        rates = rates.repeat_interleave(sizes.decays) if sizes.decays > 1 else rates
        if sizes.bound is not None:
            return sizes.bound * (rates * before).sigmoid(), self.b.sigmoid()
        return -rates * functional.softplus(before), self.b.sigmoid()


def scan(
    mixed: Tensor, log_decays: Tensor, strengths: Tensor, sizes: HeadSizes, runs: Runs, states: States | None
) -> Tensor:
    """[T, H, V]: what rows [T, C] after the convolution and norms read, by chunks; log_decays [T, H·D], strengths
    [T, H]."""
    rows = *_heads_of(mixed, sizes), log_decays.unflatten(1, (sizes.heads, sizes.decays)), strengths
    return scan_chunks(_chunk_terms, rows, runs, states)


def _heads_of(mixed: Tensor, sizes: HeadSizes) -> tuple[Tensor, Tensor, Tensor]:
    """[T, C] -> queries and keys [T, G, K], values [T, H, V]."""
    keys = sizes.groups * sizes.keys
    q, k, v = mixed.split((keys, keys, sizes.heads * sizes.values), 1)
    q, k = (x.unflatten(1, (sizes.groups, sizes.keys)) for x in (q, k))
    return q, k, v.unflatten(1, (sizes.heads, sizes.values))


def _decayed_products(x: Tensor, k: Tensor, sums: Tensor) -> Tensor:
    """[M, H, N, C, C]: products of x with the keys up to its row, whose channels decay in between.

    A block of rows has ratios of decays between its own rows alone. With the rows before it x decays since the block's
    first row, and keys up to that row: neither factor exceeds 1. x: [M, H, N, C, K]; k, sums of logarithms of decays:
    [M, H, C, K].
    """
    count, found = k.shape[2], []
    for first in range(0, count, DECAY_BLOCK):
        own, before = slice(first, first + DECAY_BLOCK), slice(0, first)
        start = sums[:, :, first : first + 1]
        keys = k[:, :, before] * (start - sums[:, :, before]).exp()
        left = (x[..., own, :] * (sums[:, :, own] - start).exp().unsqueeze(2)) @ keys.mT.unsqueeze(2)
        ratios = decay_ratios(sums[:, :, own].mT) * k[:, :, own].mT.unsqueeze(-2)
        inside = torch.einsum("mhnik, mhkij -> mhnij", x[..., own, :], ratios)
        found.append(functional.pad(torch.cat([left, inside], -1), (0, max(count - own.stop, 0))))
    return torch.cat(found, -2)


def _chunk_terms(q: Tensor, k: Tensor, v: Tensor, log_decays: Tensor, strengths: Tensor) -> tuple[Tensor, ...]:
    """As `terms_of` of `scan_chunks`; rows of padding have strength 0 and decay 1, and so change nothing. q, k:
    [M, H, C, K], v: [M, H, C, V], strengths: [M, H, C, 1], log_decays: [M, H, C, D]."""
    total = log_decays.cumsum(2)
    decays, pair = total.exp(), torch.stack([q, k], 2)
    if log_decays.shape[-1] == 1:
        ratios = decay_ratios(total.squeeze(-1))
        products = (pair.flatten(2, 3) @ k.mT).unflatten(2, (2, -1)) * ratios.unsqueeze(2)
        left = k * ratios[:, :, -1:].mT
    else:
        products = _decayed_products(pair, k, total)
        left = k * (total[:, :, -1:] - total).exp()
    (scores, system), (q, old) = products.unbind(2), (pair * decays.unsqueeze(2)).unbind(2)
    both = torch.cat([old, v], -1) * strengths
    system = system * strengths
    # The transposed system leaves rows next to each other.
    changes = torch.linalg.solve_triangular(system.mT, both.mT, upper=True, left=False, unitriangular=True).mT
    old, new = changes.split([k.shape[-1], v.shape[-1]], -1)
    return q, scores, old, new, left, decays[:, :, -1:].mT
