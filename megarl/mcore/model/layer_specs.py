"""What a model is made of: Megatron's local layers with megarl's attention and norms, dense or MoE; the scalar head."""

import dataclasses
import functools

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.mcore import device
from megarl.mcore.attention.packed_attention import PackedAttention
from megarl.mcore.config.megatron_flags import transformer_config
from megarl.mcore.kernels.norm import Norm
from megarl.mcore.kernels.swiglu_mlp import SwiGLUMLP
from megarl.mcore.model.decoder_layer import DecoderLayer, MoEDecoderLayer, PagedSelfAttention
from megarl.mcore.moe.experts import Experts, SharedExperts
from megarl.mcore.moe.router import Router


class ValueHead(torch.nn.Linear):
    """Hidden state -> one value, computed in fp32, 0 at the start; the same weights on every tensor-parallel rank.

    It stands in the place of the vocabulary's output layer and is saved under that name. Its weights have the model's
    precision: Megatron's 16-bit optimizer, which keeps fp32 copies, cannot save a model of mixed precisions.
    """

    def __init__(self, config, group):
        super().__init__(config.hidden_size, 1, dtype=config.params_dtype, device=device.device())
        self.group = group
        for parameter in self.parameters():
            torch.nn.init.zeros_(parameter)
            parameter.sequence_parallel = config.sequence_parallel  # each rank sees its tokens: gradients are summed

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [T] fp32.

        Not a matrix product of one column: how that sums a row depends on how many rows there are.
        """
        return (hidden.float() * self.weight.float()).sum(-1) + self.bias.float()

    def sharded_state_dict(self, prefix: str = "", sharded_offsets=(), metadata=None) -> dict:
        """Replicated over tensor-parallel ranks."""
        state, replicas = self.state_dict(prefix="", keep_vars=True), metadata["dp_cp_group"]
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {}, sharded_offsets, tp_group=self.group, dp_cp_group=replicas
        )


def layer_spec(args, is_moe: bool = False) -> ModuleSpec:
    """One of Megatron's local layers with norms for sequence parallelism and attention for packed and paged tokens."""
    spec = get_gpt_layer_local_spec(
        num_experts=args.num_experts if is_moe else None,
        moe_grouped_gemm=args.moe_grouped_gemm,
        normalization=args.normalization,
        qk_layernorm=args.qk_layernorm,
    )
    layer, attention = spec.submodules, spec.submodules.self_attention
    spec.module = MoEDecoderLayer if is_moe else DecoderLayer
    attention.module = PagedSelfAttention
    attention.submodules.core_attention = PackedAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = Norm
    if args.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = Norm
    if not is_moe:
        layer.mlp = functools.partial(SwiGLUMLP.as_mlp_submodule, **layer.mlp.keywords)
    else:
        parts = layer.mlp.keywords["submodules"]
        experts = functools.partial(Experts, **parts.experts.keywords)
        shared = functools.partial(SharedExperts, **parts.shared_experts.keywords)
        parts = dataclasses.replace(parts, router=Router, experts=experts, shared_experts=shared)
        layer.mlp = functools.partial(layer.mlp.func, submodules=parts)
    return spec


def moe_layer_pattern(args) -> list[bool]:
    """Whether each layer of the whole model is a mixture of experts: `--moe-layer-freq` is a period or a pattern."""
    if not args.num_experts:
        return [False] * args.num_layers
    pattern = args.moe_layer_freq
    if isinstance(pattern, int):
        return [i % pattern == 0 for i in range(args.num_layers)]
    return [bool(x) for x in pattern]


def layers_of_chunk(config, stage: int, virtual_stage: int | None) -> range:
    """Layers, numbered from 0 over the whole model, of one chunk of a pipeline stage."""
    first = get_transformer_layer_offset(config, vp_stage=virtual_stage, pp_rank=stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage=virtual_stage, pp_rank=stage))


def virtual_stage_numbers(args) -> list[int | None]:
    """Numbers of the chunks of a stage; None for the only one without virtual stages."""
    virtual = args.virtual_pipeline_model_parallel_size
    return list(range(virtual)) if virtual else [None]


def stage_layers(args) -> list[list[range]]:
    """Layers (numbered from 0 over the whole model) of every pipeline stage, a range for each of its chunks."""
    config, stages = transformer_config(args), range(args.pipeline_model_parallel_size)
    return [[layers_of_chunk(config, stage, chunk) for chunk in virtual_stage_numbers(args)] for stage in stages]


def block_spec(args, config, pg_collection, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one chunk of this rank's pipeline stage."""
    kinds = moe_layer_pattern(args)
    specs = {is_moe: layer_spec(args, is_moe) for is_moe in set(kinds)}
    layers = layers_of_chunk(config, dist.get_rank(pg_collection.pp), virtual_stage)
    return TransformerBlockSubmodules(layer_specs=[specs[kinds[i]] for i in layers], layer_norm=Norm)
