"""Which layers of a model have experts, and which layers each pipeline stage holds."""

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.mcore.config.megatron_flags import transformer_config


def moe_layer_pattern(args) -> list[bool]:
    """Returns whether each layer of the whole model has experts; `--moe-layer-freq` is a period or a pattern."""
    if not args.num_experts:
        return [False] * args.num_layers
    pattern = args.moe_layer_freq
    if isinstance(pattern, int):
        return [i % pattern == 0 for i in range(args.num_layers)]
    return [bool(x) for x in pattern]


def layers_of_chunk(config, stage: int, virtual_stage: int | None) -> range:
    """Returns the layers of one chunk of a pipeline stage, numbered from 0 over the whole model."""
    first = get_transformer_layer_offset(config, vp_stage=virtual_stage, pp_rank=stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage=virtual_stage, pp_rank=stage))


def virtual_stage_numbers(args) -> list[int | None]:
    """Returns the virtual stages of a pipeline stage's chunks; [None] without virtual pipeline parallelism."""
    virtual = args.virtual_pipeline_model_parallel_size
    return list(range(virtual)) if virtual else [None]


def stage_layers(args) -> list[list[range]]:
    """Returns a range of layers for each chunk of every pipeline stage, numbered from 0 over the whole model."""
    config, stages = transformer_config(args), range(args.pipeline_model_parallel_size)
    return [[layers_of_chunk(config, stage, chunk) for chunk in virtual_stage_numbers(args)] for stage in stages]
