"""Mamba-2's state space (2405.21060) with its convolution and steps, over the runs of a pass; computed as `delta_rule`.

Each head keeps a state S [N, P]. A token with channels x [P], step Δ, and its group's input and output vectors B, C [N]
makes it e^(−e^A·Δ)·S + B ⊗ Δ·x and reads Cᵀ·S + D·x. By chunks as in §6.
Shapes: T rows, G groups of N numbers, H heads of P channels, C = H·P + 2·G·N channels.
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from megarl.mcore.kernels import native
from megarl.mcore.recurrence.runs import Runs, States, convolved, decay_ratios, scan_chunks

CONVOLVED = ("x", "B", "C")  # parts of a layer's first projection that the convolution reads


class SpaceSizes(NamedTuple):
    """Heads of a layer on one rank."""

    groups: int  # that share B and C
    heads: int
    keys: int  # N numbers of B, and of C
    values: int  # P channels of a head
    min_step: float = 0.0  # of Δ
    decays = 1  # of a head

    @property
    def channels(self) -> int:
        """Channels of x, B and C together, which the convolution reads."""
        return self.heads * self.values + 2 * self.groups * self.keys

    @property
    def parts(self) -> dict[str, int]:
        """Rows of the layer's first projection by part, in their order; the convolution reads x, B and C."""
        values, keys = self.heads * self.values, self.groups * self.keys
        return {"z": values, "x": values, "B": keys, "C": keys, "dt": self.heads}

    wide = parts  # channels that a layer computes with, as of `HeadSizes`


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

    def by_token(self, sizes: SpaceSizes, runs: Runs, states: States) -> Tensor:
        """[T, H, P]: what each row reads, by compiled kernels; the runs change `states` in place."""
        weight = self.weight.squeeze(1).t().contiguous()
        mixed = native.ops.causal_convolution(self.x, weight, self.bias, runs.table, states.inputs)
        steps, decays = native.ops.state_space_gates(self.steps, self.decay_logs, self.biases, sizes.min_step)
        return native.ops.state_space(
            mixed, steps, decays, self.skips, sizes.groups, sizes.keys, runs.table, states.memories
        )

    def token_gradients(self, grad: Tensor, sizes: SpaceSizes, runs: Runs, memories: Tensor):
        """Backward of `by_token`, from the gradient of what rows read and the memories of the pass: convolved rows,
        steps, logarithms of decays, and skips, of PyTorch's operations, and their gradients."""
        whole = convolved(self.x, self.weight, self.bias, runs, None)
        results = whole, *self._gates(sizes), _heads_of(whole, sizes) * self.skips[:, None]
        mixed, steps, log_decays = (each.detach() for each in results[:3])
        decays = log_decays.exp()
        of_mixed, of_steps, of_decays = native.ops.state_space_backward(
            grad.contiguous(), mixed.contiguous(), steps, decays, sizes.groups, sizes.keys, runs.table, memories
        )
        return results, (of_mixed, of_steps, of_decays * decays, grad)

    def by_chunks(self, sizes: SpaceSizes, runs: Runs, states: States | None = None) -> Tensor:
        """As `by_token` up to rounding, by PyTorch's operations, which have gradients without `states`."""
        mixed = convolved(self.x, self.weight, self.bias, runs, states)
        read = scan(mixed, *self._gates(sizes), sizes, runs, states)
        return read + _heads_of(mixed, sizes) * self.skips[:, None]

    def one_token(self, sizes: SpaceSizes, numbers: Tensor, states: States) -> Tensor:
        """A decode step on CUDA: one row of each state. `numbers` [T]: of the states; rows of padding read anything."""
        from megarl.mcore.kernels.cuda.recurrent_rows import convolve_rows, space_rows  # needs Triton

        mixed = self.x.new_empty(self.x.shape)
        convolve_rows(self.x, self.weight, self.bias, numbers, states.inputs, mixed)
        read = mixed.new_empty(len(mixed), sizes.heads, sizes.values)
        gates = [self.steps, self.decay_logs, self.biases, self.skips]
        space_rows(mixed, gates, numbers, states.memories, read, sizes.groups, sizes.min_step)
        return read

    def _gates(self, sizes: SpaceSizes) -> tuple[Tensor, Tensor]:
        """Δ and logarithms of the decays, both [T, H]."""
        steps = functional.softplus(self.steps + self.biases).clamp_min(sizes.min_step)
        return steps, -self.decay_logs.exp() * steps


def scan(
    mixed: Tensor, steps: Tensor, log_decays: Tensor, sizes: SpaceSizes, runs: Runs, states: States | None
) -> Tensor:
    """[T, H, P]: what rows [T, C] after the convolution read, without skips, by chunks; steps, log_decays: [T, H]."""
    groups, heads, keys, values, _ = sizes
    x = _heads_of(mixed, sizes)
    b, c = mixed[:, heads * values :].unflatten(1, (2, groups, keys)).unbind(1)
    return scan_chunks(_chunk_terms, (c, b, x * steps.unsqueeze(-1), log_decays), runs, states)


def _heads_of(mixed: Tensor, sizes: SpaceSizes) -> Tensor:
    """[T, C] -> x [T, H, P]."""
    return mixed[:, : sizes.heads * sizes.values].unflatten(1, (sizes.heads, sizes.values))


def _chunk_terms(c: Tensor, b: Tensor, changes: Tensor, log_decays: Tensor) -> tuple:
    """As `terms_of` of `scan_chunks`; rows of padding have B = 0 and decay 1, and so change nothing. c, b:
    [M, H, C, N], changes: [M, H, C, P] Δ·x, log_decays: [M, H, C, 1]."""
    total = log_decays.cumsum(2)
    ratios, decays = decay_ratios(total.squeeze(-1)), total.exp()
    return c * decays, (c @ b.mT) * ratios, None, changes, b * ratios[:, :, -1:].mT, decays[:, :, -1:]
