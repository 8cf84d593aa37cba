"""Mamba-2 (2405.21060, Nemotron-H): packed sequences in training, a state of each request in rollout.

Shapes: T rows, G groups, H heads of P channels on this rank, I = H·P.
"""

import torch
from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.kernels.batch_invariance import silu
from megarl.mcore.kernels.norm import rms_norm
from megarl.mcore.model.recurrent_mixer import RecurrentMixer
from megarl.mcore.recurrence.rule import apply_rule
from megarl.mcore.recurrence.runs import AnyRuns
from megarl.mcore.recurrence.state_space import CONVOLVED, SpaceInputs, SpaceSizes
from megarl.mcore.recurrence.states import States


class GroupedNorm(torch.nn.Module):
    """RMSNorm of each group of channels; ranks have whole groups."""

    def __init__(self, channels: int, config):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(channels, dtype=config.params_dtype, device=device.device()))
        self._epsilon = config.layernorm_epsilon

    def forward(self, x: Tensor, groups: int, dtype: torch.dtype, weight: Tensor) -> Tensor:
        """[T, I] in fp32 -> [T, I] of a type, normed in fp32 and multiplied by weights of that type."""
        parts = x.unflatten(1, (groups, -1))
        normed = rms_norm(parts, parts.new_ones(parts.shape[-1]), self._epsilon).flatten(1)
        return normed.to(dtype) * weight


class Mamba2(RecurrentMixer):
    """x, B and C by a convolution; a state of each head; norm of groups of what it reads times silu(z)."""

    sizes: SpaceSizes

    def __init__(self, config, submodules: GatedDeltaNetSubmodules, layer_number: int, pg_collection=None, **_):
        super().__init__(config, submodules, layer_number, pg_collection, CONVOLVED, has_bias=True)
        self.D = torch.nn.Parameter(torch.ones(self.sizes.heads, device=device.device()))
        self.dt_bias.draws_steps = True
        self.norm = GroupedNorm(self.sizes.parts["x"], config)
        self._mark_split(self.D, self.norm.weight)

    def _inputs(self, wide: Tensor, shares: int = 1, share: int = 0) -> SpaceInputs:
        """What the state space reads of rows [T, in_proj rows]; arguments as of `_mixed`."""
        sizes = self._sizes_of(shares)
        _, x, steps = wide.split((sizes.parts["x"], sizes.channels, sizes.heads), 1)
        convolution = [self.conv1d.weight.float(), self.conv1d.bias.float()]
        own = self._of_share(shares, share, convolution, [self.A_log, self.dt_bias, self.D])
        return SpaceInputs(x, steps, *own)

    def _mixed(
        self, projected: Tensor, runs: AnyRuns, states: States | None, shares: int = 1, share: int = 0
    ) -> Tensor:
        """[T, in_proj rows] -> [T, I]: what each row reads from its state, gated and normed.

        `shares`, `share`: the heads are one of so many shares of this rank's.
        """
        sizes, wide = self._sizes_of(shares), projected.float()
        read = apply_rule(self._inputs(wide, shares, share), sizes, runs, states).flatten(1)
        gated = read * silu(wide[:, : sizes.parts["z"]].contiguous())
        return self.norm(gated, sizes.groups, projected.dtype, self.norm.weight.chunk(shares)[share])
