"""What layers have instead of attention: a first projection, a recurrence over runs of rows, a last projection."""

import functools

import torch
import torch.distributed as dist
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
from megarl.mcore.kernels.linear import apply_linear
from megarl.mcore.model.decoder_layer import StepPlan, local_layer
from megarl.mcore.parallel.context_parallel import to_heads, to_tokens
from megarl.mcore.recurrence.rule import layer_sizes
from megarl.mcore.recurrence.runs import AnyRuns
from megarl.mcore.recurrence.states import States


class RecurrentMixer(MegatronModule):
    """Packed sequences in training, a state of each request in rollout; a subclass says what the recurrence is.

    Parameters have the names and the checkpoint keys of Megatron's modules, which need CUDA kernels of other packages.
    """

    def __init__(
        self, config, submodules: GatedDeltaNetSubmodules, layer_number: int, pg_collection, convolved: tuple[str, ...],
        has_bias: bool,
    ):  # fmt: skip
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
        self.in_proj = submodules.in_proj(
            config.hidden_size, sum(parts.values()) * ranks, init_method=config.init_method, gather_output=False,
            skip_bias_add=False, **linear,
        )  # fmt: skip
        self.out_proj = submodules.out_proj(
            self.sizes.heads * self.sizes.values * ranks, config.hidden_size,
            init_method=config.output_layer_init_method, input_is_parallel=True, skip_bias_add=True, **linear,
        )  # fmt: skip
        self.conv1d = torch.nn.Conv1d(
            channels, channels, config.linear_conv_kernel_dim, groups=channels, bias=has_bias,
            dtype=config.params_dtype, device=device.device(),
        )  # fmt: skip
        # Always fp32: in 16 bits e^A_log would move decays by a part in 256.
        self.dt_bias = torch.nn.Parameter(torch.ones(self.sizes.heads, device=device.device()))
        self.A_log = torch.nn.Parameter(torch.zeros(self.sizes.heads, device=device.device()))
        self._mark_split(*self.conv1d.parameters(), self.dt_bias, self.A_log)
        # Which rows of the whole matrix a rank holds: its share of each part.
        self._convolved = {name: parts[name] for name in convolved}
        self.in_proj.weight.parts = tuple(parts.values())
        for parameter in self.conv1d.parameters():
            parameter.parts = tuple(self._convolved.values())

    def _mark_split(self, *parameters: torch.nn.Parameter):
        """Sets the marks of parameters whose first axis is split over tensor-parallel ranks."""
        for parameter in parameters:
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def _inputs(self, wide: Tensor, shares: int = 1, share: int = 0):
        """What the recurrence reads of rows [T, in_proj rows]; arguments as of `_mixed`."""
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

    def _mixed(
        self, projected: Tensor, runs: AnyRuns, states: States | None, shares: int = 1, share: int = 0
    ) -> Tensor:
        """[T, in_proj rows] -> [T, out_proj columns].

        `shares`, `share`: the heads are one of so many shares of this rank's.
        """
        raise NotImplementedError

    def forward(
        self, hidden_states, attention_mask=None, *, inference_context=None, rotary_pos_emb=None,
        packed_seq_params=None, **_,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """[T, 1, H] (under sequence parallelism, this rank's tokens) -> output of that shape, and no bias.

        `packed_seq_params` is a `PackedLayout`, `inference_context` a `RecurrentContext`.
        """
        if inference_context is not None:
            return self.step(hidden_states, inference_context.plan(rotary_pos_emb))
        projected, _ = self.in_proj(hidden_states)
        layout = packed_seq_params
        if layout.order is None:
            return self.out_proj(self._mixed(projected.squeeze(1), layout.runs, None).unsqueeze(1))
        parts = tuple(self.sizes.parts.values())
        of_heads = to_heads(projected.squeeze(1), parts, layout.order, layout.cp_group)
        ranks, rank = dist.get_world_size(layout.cp_group), dist.get_rank(layout.cp_group)
        mixed = to_tokens(self._mixed(of_heads, layout.runs, None, ranks, rank), layout.order, layout.cp_group)
        return self.out_proj(mixed.unsqueeze(1))

    _layer = functools.cached_property(local_layer)

    def step(self, hidden: Tensor, plan: StepPlan) -> tuple[Tensor, Tensor | None]:
        """Same as `forward` for the rows of a step, whose runs continue the states of their requests."""
        projected, _ = apply_linear(self.in_proj, hidden)
        mixed = self._mixed(projected.squeeze(1), plan.runs, plan.states[self._layer])
        if plan.drafted is not None:
            plan.drafted[self._layer] = self._inputs(projected.squeeze(1).float())
        return apply_linear(self.out_proj, mixed.unsqueeze(1))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None, tp_group=None):
        """The parameters by their keys in checkpoints; those of several parts have a key of each."""
        metadata, group = ensure_metadata_has_dp_cp_group(metadata), tp_group or self.tp_group
        own = {name: each for name, each in self.named_parameters() if not name.startswith(("in_proj.", "out_proj."))}
        axes = {name: 0 for name, each in own.items() if getattr(each, "tensor_model_parallel", False)}
        found = make_sharded_tensors_for_checkpoint(
            own, prefix, axes, sharded_offsets, tp_group=group, dp_cp_group=metadata["dp_cp_group"]
        )
        for name in ("in_proj", "out_proj"):
            module = getattr(self, name)
            found |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=group)
        split = {"in_proj.weight": self.sizes.parts}
        split |= {f"conv1d.{name}": self._convolved for name, _ in self.conv1d.named_parameters()}
        for key, parts in split.items():
            found[prefix + key] = _split_tensor_factory(found[prefix + key], list(parts.values()), list(parts), 0)
        return found
