"""The factors of a model: they are added before training, merged after each update, and taken out for the reference."""

import contextlib
import re
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megarl.mcore.kernels.linear import ReplicatedLinear
from megarl.mcore.lora.adapted_linear import AdaptedLinear
from megarl.mcore.lora.targets import LoRASettings, projections_of
from megarl.mcore.model.gpt import value_head_of
from megarl.mcore.model.initialization import global_name
from megarl.mcore.parallel.fsdp import gathered_outside_layers, rows_here
from megarl.mcore.weights.dist_checkpoint import BALANCING

EXPERT = re.compile(r"(.*\.local_experts)\.(\d+)(\..*)")


class Adapter(torch.nn.Module):
    """The factors of one chunk, in the order of its layers; the chunk has it as `adapter`."""

    def __init__(self, chunk, lora: LoRASettings, args, pg_collection):
        """Draws factors for the layers that the targets name; `attach` makes the chunk train them."""
        super().__init__()
        self.pg_collection, self.experts = pg_collection, args.num_experts
        if args.model_folder is not None:
            self.linears = torch.nn.ModuleList(chunk.adapted(args.model_folder.linears(lora.targets), lora, args.seed))
            return
        found = []
        for name, layer in chunk.decoder.named_modules(prefix="decoder"):
            is_linear = isinstance(layer, (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear))
            if is_linear and (projections := projections_of(name, layer, args, lora.targets)):
                whole_name = global_name(f"{name}.", chunk, pg_collection).removesuffix(".")
                found.append(AdaptedLinear(whole_name, layer, projections, lora, args.seed))
        self.linears = torch.nn.ModuleList(found)

    def attach(self, chunk):
        """Freezes the chunk, except for a scalar head, and makes it train the factors."""
        for parameter in chunk.parameters():
            parameter.requires_grad_(False)
        if value_head_of(chunk):
            chunk.output_layer.requires_grad_(True)
        for linear in self.linears:
            linear.attach()
        chunk.adapter = self
        if chunk.pre_process:
            give_gradient_to_layers(chunk)

    @property
    def is_apart(self) -> bool:
        """Whether layers add the factors' product to their output, because their weights have 16 bits."""
        linears: Any = self.linears
        return not all(linear.product.is_merged for linear in linears)

    def fold(self):
        """Adds the whole factors to the weights for good, with rounding in 16 bits; they must not be merged."""
        for linear in self.linears:
            linear.fold()

    def sharded_state_dict(self, *_, **__) -> dict:
        """Nothing: the model's weights contain the factors. Checkpoints of the factors use `trained_state`."""
        return {}

    def trained_state(self, chunk, metadata: dict) -> dict:
        """Describes to checkpoints all that training changes: factors, a scalar head, balancing buffers of experts."""
        state = {}
        for i, linear in enumerate(self.linears):
            name, expert = linear.whole_name, None
            replicas = self.pg_collection.dp_cp
            if match := EXPERT.fullmatch(name):
                name, expert = match[1] + match[3], (int(match[2]), self.experts)
                replicas = self.pg_collection.expt_dp
            state |= linear.sharded_state(f"adapter.linears.{i}.", name, expert, dist.get_rank(replicas))
        head = ("output_layer.",) if value_head_of(chunk) else ()
        whole = chunk.sharded_state_dict(metadata=metadata).items()
        return state | {name: v for name, v in whole if name.startswith(head) or name.endswith(BALANCING)}


def add_factors(stages, lora: LoRASettings, args, pg_collection, is_frozen: bool = False):
    """Freezes a model and adds factors, which change no result until they are trained; a scalar head stays trainable.

    Args:
        stages: the model's bare chunks, before they get gradient buffers.
        args: the role's Megatron namespace.
        is_frozen: nothing is trained here; others fill the factors.
    """
    for chunk in stages:
        Adapter(chunk, lora, args, pg_collection).attach(chunk)
        if is_frozen:
            chunk.requires_grad_(False)


def give_gradient_to_layers(chunk):
    """Makes recomputed layers after a frozen embedding trainable; `chunk`: the first one.

    Recomputation saves no graph of a layer unless one of its inputs needs a gradient.
    """
    if chunk.config.recompute_granularity is not None and hasattr(chunk, "embedding"):
        chunk.embedding.register_forward_hook(lambda module, inputs, output: _with_gradient(output))


def _with_gradient(output: torch.Tensor) -> torch.Tensor:
    return output if output.requires_grad or not torch.is_grad_enabled() else output.requires_grad_()


def adapted_linears(stages) -> list[AdaptedLinear]:
    """The layers with factors; [] for a model without."""
    return [linear for chunk in stages if hasattr(chunk, "adapter") for linear in chunk.adapter.linears]


def keeps_apart(args) -> bool:
    """Whether the weights of a role's model do not contain its factors; `args`: its Megatron namespace."""
    return args.params_dtype is not torch.float32


def trained_state(chunk, metadata: dict) -> dict:
    """`Adapter.trained_state` of a chunk with factors."""
    return chunk.adapter.trained_state(chunk, metadata)


def keep_base(stages):
    """Copies the weights under the factors that will be merged; FSDP must have sharded them before."""
    for linear in adapted_linears(stages):
        linear.keep_base()


def merge(stages):
    """Puts the present factors into the weights, after an update or a load. A collective under FSDP."""
    for chunk in stages:
        if hasattr(chunk, "adapter") and not chunk.adapter.is_apart:
            with gathered_outside_layers(chunk):
                for linear in chunk.adapter.linears:
                    linear.merge()


def set_base(stages):
    """Takes the present weights as those under the factors, after they were loaded; then merges."""
    for linear in adapted_linears(stages):
        linear.set_base()
    merge(stages)


@contextlib.contextmanager
def base_weights(stages):
    """Context with the weights under the factors, to the last bit: of the reference policy.

    Exchanges memory; only under FSDP it copies this rank's rows.
    """
    linears = adapted_linears(stages)
    for linear in linears:
        linear.swap_base()
    try:
        yield
    finally:
        for linear in linears:
            linear.swap_base()


@contextlib.contextmanager
@torch.no_grad()
def folded_weights(stages):
    """Context with weights that contain the factors, for an export; rounded in 16 bits, where they are apart."""
    apart = [chunk for chunk in stages if hasattr(chunk, "adapter") and chunk.adapter.is_apart]
    weights = [rows_here(linear.layer.weight) for linear in adapted_linears(apart)]
    kept = [weight.clone() for weight in weights]
    for chunk in apart:
        with gathered_outside_layers(chunk):
            chunk.adapter.fold()
    try:
        yield
    finally:
        for weight, of_base in zip(weights, kept, strict=True):
            weight.copy_(of_base)
