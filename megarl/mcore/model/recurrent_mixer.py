"""What layers have instead of attention: a first projection, a recurrence over runs of rows, a last projection.

The recurrence is a gated delta net (2412.06464, Qwen3-Next), one with decays by channel (Kimi delta attention,
2510.26692) or Mamba-2 (2405.21060, Nemotron-H): packed sequences in training, a state of each request in rollout,
neither of which Megatron's modules have.
Shapes on this rank: T rows; of a gated delta net G key heads with K channels and H value heads with V channels, D
decays of a head; of Mamba-2 G groups, H heads of P channels, I = H·P. W: channels that a layer computes with, the rows
of its first projection but for gates that come from latents.
"""

import functools

import torch
import torch.distributed as dist
from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.kernels.batch_invariance import sigmoid, silu
from megarl.mcore.kernels.linear import ReplicatedLinear, apply_linear, of_all_tokens, to_all_ranks
from megarl.mcore.kernels.norm import RMSNorm, rms_norm
from megarl.mcore.model.decoder_layer import StepPlan, local_layer
from megarl.mcore.parallel.context_parallel import to_heads, to_tokens
from megarl.mcore.recurrence import apply_rule, layer_sizes
from megarl.mcore.recurrence.delta_rule import HeadSizes, Inputs
from megarl.mcore.recurrence.runs import AnyRuns, States
from megarl.mcore.recurrence.state_space import CONVOLVED, SpaceInputs, SpaceSizes


class RecurrentMixer(MegatronModule):
    """Packed sequences in training, a state of each request in rollout; a subclass says what the recurrence is.

    Parameters have the names and the checkpoint keys of Megatron's modules, which need CUDA kernels of other packages.
    """

    def __init__(
        self, config, submodules, layer_number: int, pg_collection, convolved: tuple[str, ...], has_bias: bool
    ):
        """Builds the projections, the convolution, and the parameters of heads that both kinds have.

        Args:
            convolved: parts of the first projection that the convolution reads.
            has_bias: of the convolution.
        """
        super().__init__(config)
        self.layer_number, self.pg_collection, self.tp_group = layer_number, pg_collection, pg_collection.tp
        ranks = pg_collection.tp.size()
        self.sizes = layer_sizes(config, ranks)
        parts, channels = self.sizes.parts, self.sizes.channels
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        first = linear | {"init_method": config.init_method, "gather_output": False, "skip_bias_add": False}
        self.in_proj = submodules.in_proj(config.hidden_size, sum(parts.values()) * ranks, **first)
        last = {"init_method": config.output_layer_init_method, "input_is_parallel": True, "skip_bias_add": True}
        columns = self.sizes.heads * self.sizes.values * ranks
        self.out_proj = submodules.out_proj(columns, config.hidden_size, **linear, **last)
        on = {"dtype": config.params_dtype, "device": device.device()}
        taps = config.linear_conv_kernel_dim
        self.conv1d = torch.nn.Conv1d(channels, channels, taps, groups=channels, bias=has_bias, **on)
        # Always fp32: in 16 bits e^A_log would move decays by a part in 256.
        self.dt_bias = torch.nn.Parameter(torch.ones(self.sizes.heads * self.sizes.decays, device=device.device()))
        self.A_log = torch.nn.Parameter(torch.zeros(self.sizes.heads, device=device.device()))
        self._mark_split(*self.conv1d.parameters(), self.dt_bias, self.A_log)
        # Which rows of the whole matrix a rank holds: its share of each part.
        self._convolved = {name: parts[name] for name in convolved}
        self.in_proj.weight.parts = tuple(parts.values())
        for parameter in self.conv1d.parameters():
            parameter.parts = tuple(self._convolved.values())

    def _mark_split(self, *parameters: torch.nn.Parameter):
        for parameter in parameters:
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def _projected(self, hidden: Tensor) -> Tensor:
        """[T, 1, H] (under sequence parallelism, this rank's tokens) -> [T, W]."""
        return apply_linear(self.in_proj, hidden)[0].squeeze(1)

    def _inputs(self, wide: Tensor, shares: int = 1, share: int = 0):
        """What the recurrence reads of rows [T, W]; arguments as of `_mixed`."""
        raise NotImplementedError

    def _gated(self, read: Tensor, wide: Tensor, dtype: torch.dtype, shares: int, share: int) -> Tensor:
        """[T, out_proj columns] of a type: what rows read [T, H, V] from their states, gated by a part of `wide`, and
        normed; arguments as of `_inputs`."""
        raise NotImplementedError

    def _sizes_of(self, shares: int):
        return self.sizes._replace(groups=self.sizes.groups // shares, heads=self.sizes.heads // shares)

    def _of_share(self, shares: int, share: int, channels: list[Tensor], heads: list[Tensor]) -> list[Tensor]:
        """Parameters of the convolution, then those of the heads, of one share; `shares`, `share`: as of `_mixed`."""
        if shares == 1:
            return channels + heads
        split = [whole.split(list(self._convolved.values())) for whole in channels]
        channels = [torch.cat([part.chunk(shares)[share] for part in parts]) for parts in split]
        return channels + [whole.chunk(shares)[share] for whole in heads]

    def _mixed(self, projected: Tensor, runs: AnyRuns, states: States | None, shares=1, share=0) -> Tensor:
        """[T, W] -> [T, out_proj columns].

        `shares`, `share`: the heads are one of so many shares of this rank's.
        """
        wide = projected.float()
        read = apply_rule(self._inputs(wide, shares, share), self._sizes_of(shares), runs, states)
        return self._gated(read, wide, projected.dtype, shares, share)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        *,
        inference_context=None,
        rotary_pos_emb=None,
        packed_seq_params=None,
        **_,
    ) -> tuple[Tensor, Tensor | None]:
        """[T, 1, H] (under sequence parallelism, this rank's tokens) -> output of that shape, and no bias.

        `packed_seq_params` is a `PackedLayout`, `inference_context` a `RecurrentContext`.
        """
        if inference_context is not None:
            return self.step(hidden_states, inference_context.plan(rotary_pos_emb))
        projected, layout = self._projected(hidden_states), packed_seq_params
        if layout.order is None:
            return self.out_proj(self._mixed(projected, layout.runs, None).unsqueeze(1))
        parts = tuple(self.sizes.wide.values())
        of_heads = to_heads(projected, parts, layout.order, layout.cp_group)
        ranks, rank = dist.get_world_size(layout.cp_group), dist.get_rank(layout.cp_group)
        mixed = to_tokens(self._mixed(of_heads, layout.runs, None, ranks, rank), layout.order, layout.cp_group)
        return self.out_proj(mixed.unsqueeze(1))

    _layer = functools.cached_property(local_layer)

    def step(self, hidden: Tensor, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        """Same as `forward` for the rows of a step, whose runs continue the states of their requests."""
        projected = self._projected(hidden)
        mixed = self._mixed(projected, plan.runs, plan.states[self._layer])
        if plan.drafted is not None:
            plan.drafted[self._layer] = self._inputs(projected.float())
        return apply_linear(self.out_proj, mixed.unsqueeze(1))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None, tp_group=None):
        """The parameters by their keys in checkpoints; those of several parts have a key of each."""
        metadata, group = ensure_metadata_has_dp_cp_group(metadata), tp_group or self.tp_group
        linears = [name for name, module in self.named_children() if isinstance(module, ColumnParallelLinear)]
        linears.append("out_proj")
        own = {name: each for name, each in self.named_parameters() if name.split(".")[0] not in linears}
        axes = {name: 0 for name, each in own.items() if getattr(each, "tensor_model_parallel", False)}
        found = make_sharded_tensors_for_checkpoint(
            own, prefix, axes, sharded_offsets, tp_group=group, dp_cp_group=metadata["dp_cp_group"]
        )
        for name in linears:
            module = getattr(self, name)
            found |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=group)
        split = {"in_proj.weight": self.sizes.parts}
        split |= {f"conv1d.{name}": self._convolved for name, _ in self.conv1d.named_parameters()}
        for key, parts in split.items():
            found[prefix + key] = _split_tensor_factory(found[prefix + key], list(parts.values()), list(parts), 0)
        return found


# -- gated delta net -----------------------------------------------------------------------------------------------


class GatedDeltaNet(RecurrentMixer):
    """Queries, keys and values by a convolution; a state of each head; gated norm of what it reads."""

    sizes: HeadSizes

    def __init__(self, config, submodules: GatedDeltaNetSubmodules, layer_number: int, pg_collection=None, **_):
        super().__init__(config, submodules, layer_number, pg_collection, ("query", "key", "value"), has_bias=False)
        self.out_norm = RMSNorm(self.sizes.values, config.layernorm_epsilon, dtype=config.params_dtype)  # of each head
        self.out_norm.group = self.tp_group if self.tp_group.size() > 1 else None

    def _inputs(self, wide: Tensor, shares: int = 1, share: int = 0) -> Inputs:
        sizes = self._sizes_of(shares)
        *_, values, heads, decays = sizes.wide.values()
        x, _, b, a = wide.split((sizes.channels, values, heads, decays), 1)
        own = self._of_share(shares, share, [self.conv1d.weight.float()], [self.A_log, self.dt_bias])
        return Inputs._make([x, a, b, *own])

    def _gated(self, read: Tensor, wide: Tensor, dtype: torch.dtype, shares: int, share: int) -> Tensor:
        sizes = self._sizes_of(shares)
        z = wide[:, sizes.channels : sizes.channels + sizes.heads * sizes.values]
        return (self.out_norm(read.to(dtype)).flatten(1) * self._gate(z.contiguous())).to(dtype)

    _gate = staticmethod(silu)  # of the output


class KimiDelta(GatedDeltaNet):
    """A gated delta net with a decay of each channel of a key, and a sigmoid of its output gates. Decays and gates come
    from hidden states, or each from a latent of its own, which is whole on each tensor-parallel rank."""

    def __init__(self, config, submodules: GatedDeltaNetSubmodules, layer_number: int, pg_collection=None, **_):
        super().__init__(config, submodules, layer_number, pg_collection)
        self.dt_bias.draws_steps = True
        rank, ranks = self.sizes.gate_rank, self.tp_group.size()
        off = dict.fromkeys(("bias", "is_expert", "gather_output", "skip_bias_add"), False)
        own = off | {"config": config, "init_method": config.init_method, "tp_group": self.tp_group}
        if rank:
            self.latent_proj = ReplicatedLinear(
                config.hidden_size, len(self.sizes.latents) * rank, config, self.tp_group
            )
        for part in self.sizes.latents:
            self.add_module(
                f"{part}_proj", of_all_tokens(submodules.in_proj(rank, self.sizes.wide[part] * ranks, **own))
            )

    def _projected(self, hidden: Tensor) -> Tensor:
        projected = super()._projected(hidden)
        if not self.sizes.gate_rank:
            return projected
        latents = to_all_ranks(self.latent_proj(hidden), self.tp_group, self.config.sequence_parallel)
        ups = zip(self.sizes.latents, latents.chunk(len(self.sizes.latents), -1), strict=True)
        found = {part: apply_linear(getattr(self, f"{part}_proj"), latent.contiguous())[0] for part, latent in ups}
        found |= zip(self.sizes.parts, projected.split([*self.sizes.parts.values()], 1), strict=True)
        return torch.cat([found[part].flatten(1) for part in self.sizes.wide], 1)

    _gate = staticmethod(sigmoid)


# -- Mamba-2 -------------------------------------------------------------------------------------------------------


class Mamba2(RecurrentMixer):
    """x, B and C by a convolution; a state of each head; norm of groups of what it reads times silu(z)."""

    sizes: SpaceSizes

    def __init__(self, config, submodules: GatedDeltaNetSubmodules, layer_number: int, pg_collection=None, **_):
        super().__init__(config, submodules, layer_number, pg_collection, CONVOLVED, has_bias=True)
        self.D = torch.nn.Parameter(torch.ones(self.sizes.heads, device=device.device()))
        self.dt_bias.draws_steps = True
        self.norm = RMSNorm(self.sizes.parts["x"], config.layernorm_epsilon, dtype=config.params_dtype)
        self._mark_split(self.D, self.norm.weight)

    def _inputs(self, wide: Tensor, shares: int = 1, share: int = 0) -> SpaceInputs:
        sizes = self._sizes_of(shares)
        _, x, steps = wide.split((sizes.parts["x"], sizes.channels, sizes.heads), 1)
        convolution = [self.conv1d.weight.float(), self.conv1d.bias.float()]
        own = self._of_share(shares, share, convolution, [self.A_log, self.dt_bias, self.D])
        return SpaceInputs._make([x, steps, *own])

    def _gated(self, read: Tensor, wide: Tensor, dtype: torch.dtype, shares: int, share: int) -> Tensor:
        sizes = self._sizes_of(shares)
        gated = read.flatten(1) * silu(wide[:, : sizes.parts["z"]].contiguous())
        groups = gated.unflatten(1, (sizes.groups, -1))  # each normed alone, in fp32; ranks have whole ones
        normed = rms_norm(groups, groups.new_ones(groups.shape[-1]), self.norm.eps).flatten(1)
        return normed.to(dtype) * self.norm.weight.chunk(shares)[share]
