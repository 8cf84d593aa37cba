"""Gated delta net (2412.06464, Qwen3-Next): packed sequences in training, a state of each request in rollout.

Megatron's module has no packed sequences in its deterministic form, and no inference.
Shapes: T rows, G key heads with K channels and H value heads with V channels on this rank.
"""

from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from torch import Tensor

from megarl.mcore.kernels.batch_invariance import silu
from megarl.mcore.kernels.norm import RMSNorm
from megarl.mcore.model.recurrent_mixer import RecurrentMixer
from megarl.mcore.recurrence.delta_rule import HeadSizes, Inputs
from megarl.mcore.recurrence.rule import apply_rule
from megarl.mcore.recurrence.runs import AnyRuns
from megarl.mcore.recurrence.states import States


class _SplitHeadsNorm(RMSNorm):
    """RMSNorm of each head, whose heads are split over tensor-parallel ranks: they share the weights' gradient."""

    def __init__(self, channels: int, config, group):
        super().__init__(channels, eps=config.layernorm_epsilon, dtype=config.params_dtype)
        self._group = group

    def own_weight(self) -> Tensor:
        """The weights, with a gradient that is summed over the ranks."""
        return copy_to_tensor_model_parallel_region(self.weight, self._group) if self._group.size() > 1 else self.weight


class GatedDeltaNet(RecurrentMixer):
    """Queries, keys and values by a convolution; a state of each head; gated norm of what it reads."""

    sizes: HeadSizes

    def __init__(self, config, submodules: GatedDeltaNetSubmodules, layer_number: int, pg_collection=None, **_):
        super().__init__(config, submodules, layer_number, pg_collection, ("query", "key", "value"), has_bias=False)
        self.out_norm = _SplitHeadsNorm(self.sizes.values, config, self.tp_group)

    def _inputs(self, wide: Tensor, shares: int = 1, share: int = 0) -> Inputs:
        """What the rule reads of rows [T, in_proj rows]; arguments as of `_mixed`."""
        sizes = self._sizes_of(shares)
        x, _, b, a = wide.split((sizes.channels, sizes.heads * sizes.values, sizes.heads, sizes.heads), 1)
        own = self._of_share(shares, share, [self.conv1d.weight.float()], [self.A_log, self.dt_bias])
        return Inputs(x, a, b, *own)

    def _mixed(
        self, projected: Tensor, runs: AnyRuns, states: States | None, shares: int = 1, share: int = 0
    ) -> Tensor:
        """[T, in_proj rows] -> [T, H·V]: what each row reads from its state, normed and gated.

        `shares`, `share`: the heads are one of so many shares of this rank's.
        """
        sizes, wide = self._sizes_of(shares), projected.float()
        read = apply_rule(self._inputs(wide, shares, share), sizes, runs, states).to(projected.dtype)
        z = wide[:, sizes.channels : sizes.channels + sizes.heads * sizes.values]
        gated = self.out_norm(read).flatten(1) * silu(z.contiguous())
        return gated.to(projected.dtype)
