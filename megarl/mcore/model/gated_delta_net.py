"""Gated delta net (2412.06464, Qwen3-Next): packed sequences in training, a state of each request in rollout.

Parameters have the names and the checkpoint keys of Megatron's module; the rest is megarl's own. Megatron's module
needs CUDA kernels of another package, has no packed sequences in its deterministic form, and no inference.
Shapes: T rows, G key heads with K channels and H value heads with V channels on this rank.
"""

import torch
from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules, _GDNBase
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.kernels.norm import RMSNorm
from megarl.mcore.kernels.silu import silu
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


class GatedDeltaNet(RecurrentMixer, _GDNBase):
    """Queries, keys and values by a convolution; a state of each head; gated norm of what it reads.

    Of Megatron's class it uses `sharded_state_dict` alone, and sets the attributes that this reads: the constructor
    needs the other package.
    """

    def __init__(self, config, submodules: GatedDeltaNetSubmodules, layer_number: int, pg_collection=None, **_):
        MegatronModule.__init__(self, config)
        self.layer_number, self.pg_collection, self.tp_group = layer_number, pg_collection, pg_collection.tp
        ranks = self.tp_size = pg_collection.tp.size()
        self.sizes = HeadSizes.of(config, ranks)
        heads, parts = self.sizes.heads, self.sizes.parts
        keys, values = parts["key"], parts["value"]
        self.qk_dim_local_tp, self.v_dim_local_tp, self.conv_dim_local_tp = keys, values, self.sizes.channels
        self.in_proj_split_names, self.in_proj_split_sections = list(parts), tuple(parts.values())
        self.in_proj_dim, self.conv_bias = sum(self.in_proj_split_sections) * ranks, False
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = submodules.in_proj(
            config.hidden_size, self.in_proj_dim, init_method=config.init_method, gather_output=False,
            skip_bias_add=False, **linear,
        )  # fmt: skip
        self.out_proj = submodules.out_proj(
            values * ranks, config.hidden_size, init_method=config.output_layer_init_method, input_is_parallel=True,
            skip_bias_add=True, **linear,
        )  # fmt: skip
        self.conv1d = torch.nn.Conv1d(
            self.sizes.channels, self.sizes.channels, config.linear_conv_kernel_dim, groups=self.sizes.channels,
            bias=False, dtype=config.params_dtype, device=device.device(),
        )  # fmt: skip
        # Always fp32: in 16 bits e^A_log would move decays by a part in 256.
        self.dt_bias = torch.nn.Parameter(torch.ones(heads, device=device.device()))
        self.A_log = torch.nn.Parameter(torch.zeros(heads, device=device.device()))
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        # Which rows of the whole matrix a rank holds: its share of each part.
        self.in_proj.weight.parts = self.in_proj_split_sections
        self.conv1d.weight.parts = self._convolved = (keys, keys, values)
        self.out_norm = _SplitHeadsNorm(self.sizes.values, config, self.tp_group)

    def _inputs(self, wide: Tensor, shares: int = 1, share: int = 0) -> Inputs:
        """What the rule reads of rows [T, in_proj rows]; arguments as of `_mixed`."""
        sizes = self._sizes_of(shares)
        x, _, b, a = wide.split((sizes.channels, sizes.heads * sizes.values, sizes.heads, sizes.heads), 1)
        weight, logs, biases = self.conv1d.weight.float(), self.A_log, self.dt_bias
        if shares > 1:
            weight = torch.cat([part.chunk(shares)[share] for part in weight.split(self._convolved)])
            logs, biases = logs.chunk(shares)[share], biases.chunk(shares)[share]
        return Inputs(x, a, b, weight, logs, biases)

    def _sizes_of(self, shares: int) -> HeadSizes:
        return self.sizes._replace(groups=self.sizes.groups // shares, heads=self.sizes.heads // shares)

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
