"""Mamba-2 (2405.21060, Nemotron-H): packed sequences in training, a state of each request in rollout.

Parameters have the names of Megatron's mixer, and in checkpoints its parts; the rest is megarl's own: Megatron's needs
CUDA kernels of another package. Shapes: T rows, G groups, H heads of P channels on this rank, I = H·P.
"""

import torch
from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.kernels.norm import rms_norm
from megarl.mcore.kernels.silu import silu
from megarl.mcore.model.recurrent_mixer import RecurrentMixer
from megarl.mcore.recurrence.layer_sizes import layer_sizes
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


class Mamba2(RecurrentMixer, MegatronModule):
    """x, B and C by a convolution; a state of each head; norm of groups of what it reads times silu(z)."""

    def __init__(self, config, submodules: GatedDeltaNetSubmodules, layer_number: int, pg_collection=None, **_):
        MegatronModule.__init__(self, config)
        self.layer_number, self.pg_collection, self.tp_group = layer_number, pg_collection, pg_collection.tp
        ranks, sizes = pg_collection.tp.size(), layer_sizes(config, pg_collection.tp.size())
        assert isinstance(sizes, SpaceSizes)
        self.sizes, parts, channels = sizes, sizes.parts, sizes.channels
        self.in_proj_split_sections = tuple(parts.values())
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = submodules.in_proj(
            config.hidden_size, sum(parts.values()) * ranks, init_method=config.init_method, gather_output=False,
            skip_bias_add=False, **linear,
        )  # fmt: skip
        self.out_proj = submodules.out_proj(
            parts["x"] * ranks, config.hidden_size, init_method=config.output_layer_init_method,
            input_is_parallel=True, skip_bias_add=True, **linear,
        )  # fmt: skip
        self.conv1d = torch.nn.Conv1d(
            channels, channels, config.linear_conv_kernel_dim, groups=channels, dtype=config.params_dtype,
            device=device.device(),
        )  # fmt: skip
        # Always fp32: in 16 bits e^A_log would move decays by a part in 256.
        self.dt_bias, self.A_log, self.D = (
            torch.nn.Parameter(torch.full((sizes.heads,), value, device=device.device())) for value in (1.0, 0.0, 1.0)
        )
        self.dt_bias.draws_steps = True
        self.norm = GroupedNorm(parts["x"], config)
        for parameter in (*self.conv1d.parameters(), self.dt_bias, self.A_log, self.D, self.norm.weight):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        # Which rows of the whole matrix a rank holds: its share of each part.
        self.in_proj.weight.parts = self.in_proj_split_sections
        self.conv1d.weight.parts = self.conv1d.bias.parts = self._convolved = tuple(parts[name] for name in CONVOLVED)

    def _inputs(self, wide: Tensor, shares: int = 1, share: int = 0) -> SpaceInputs:
        """What the state space reads of rows [T, in_proj rows]; arguments as of `_mixed`."""
        sizes = self._sizes_of(shares)
        _, x, steps = wide.split((sizes.parts["x"], sizes.channels, sizes.heads), 1)
        weight, bias = self.conv1d.weight.float(), self.conv1d.bias.float()
        of_heads = self.A_log, self.dt_bias, self.D
        if shares > 1:
            weight, bias = (
                torch.cat([part.chunk(shares)[share] for part in whole.split(self._convolved)])
                for whole in (weight, bias)
            )
            of_heads = tuple(each.chunk(shares)[share] for each in of_heads)
        return SpaceInputs(x, steps, weight, bias, *of_heads)

    def _sizes_of(self, shares: int) -> SpaceSizes:
        return self.sizes._replace(groups=self.sizes.groups // shares, heads=self.sizes.heads // shares)

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

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None, tp_group=None):
        """The parameters by their keys in checkpoints; those of several parts have a key of each."""
        metadata, group = ensure_metadata_has_dp_cp_group(metadata), tp_group or self.tp_group
        own = {name: each for name, each in self.named_parameters() if not name.startswith(("in_proj.", "out_proj."))}
        found = make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(own, 0), sharded_offsets, tp_group=group, dp_cp_group=metadata["dp_cp_group"]
        )
        for name in ("in_proj", "out_proj"):
            module = getattr(self, name)
            found |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=group)
        convolved = {name: self.sizes.parts[name] for name in CONVOLVED}
        split = {"in_proj.weight": self.sizes.parts, "conv1d.weight": convolved, "conv1d.bias": convolved}
        for key, parts in split.items():
            found[prefix + key] = _split_tensor_factory(found[prefix + key], list(parts.values()), list(parts), 0)
        return found
