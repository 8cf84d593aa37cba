"""What the layers of a model have, and which layers each pipeline stage holds."""

import functools
from types import SimpleNamespace
from typing import NamedTuple

from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.errors import UsageError


def moe_layer_pattern(args) -> list[bool]:
    """Returns whether each layer of the whole model has experts; `--moe-layer-freq` is a period or a pattern."""
    if args.hybrid_layer_pattern:
        return [letter == "E" for letter in args.hybrid_layer_pattern]
    pattern = args.moe_layer_freq if args.num_experts else [False] * args.num_layers
    return [i % pattern == 0 for i in range(args.num_layers)] if isinstance(pattern, int) else list(map(bool, pattern))


class RoutedLayers(NamedTuple):
    """The MoE layers of a whole model whose routes can be recorded and replayed."""

    numbers: tuple[int, ...]  # from 1
    experts: int  # E of each; 0: there are none
    topk: int

    @classmethod
    def of(cls, args) -> "RoutedLayers":
        """Those of a role's Megatron namespace."""
        if args.model_folder is not None:
            return args.model_folder.routed_layers()[0]
        numbers = (number for number, has_experts in enumerate(moe_layer_pattern(args), 1) if has_experts)
        return cls(tuple(numbers), args.num_experts or 0, args.moe_router_topk)


def recurrent_layer_pattern(args) -> list[bool]:
    """Returns whether each layer of the whole model has a recurrent state instead of attention: all but every N-th of
    `--linear-attention-freq` N, or a pattern; those with an M of `--hybrid-layer-pattern`."""
    if args.hybrid_layer_pattern:
        return [letter == "M" for letter in args.hybrid_layer_pattern]
    every = [False] * args.num_layers if args.experimental_attention_variant is None else args.linear_attention_freq
    return [bool((i + 1) % every) for i in range(args.num_layers)] if isinstance(every, int) else list(map(bool, every))


def attention_layer_pattern(args) -> list[bool]:
    """Returns whether each layer of the whole model has attention, and so keys and values in a cache."""
    return [kind.has_mixer and not kind.is_recurrent for kind in layer_kinds(args)]


def indexer_pattern(args) -> list[bool]:
    """Returns whether each layer of the whole model has an indexer; `args`: Megatron's namespace, or a config."""
    has_some, pattern = args.dsa_indexer_topk is not None, args.dsa_indexer_layers
    return list(map(bool, pattern)) if pattern is not None else [has_some] * args.num_layers


def indexer_of(config, layer_number: int) -> int:
    """Returns the layer, both counted from 1, whose choice of keys a layer uses: the last one with an indexer up to it;
    a layer of multi-token prediction, after the last one, has its own."""
    if layer_number > config.num_layers:
        return layer_number
    return max(number for number, has in enumerate(indexer_pattern(config)[:layer_number], 1) if has)


def check_shared_choices(role: str, args):
    """UsageError for a chunk of a pipeline stage that begins with a layer that shares another one's choice of keys."""
    has_indexer = indexer_pattern(args) if args.dsa_indexer_layers is not None else []
    for stage, chunks in enumerate(stage_layers(args) if has_indexer else ()):
        for first in (layers[0] for layers in chunks if len(layers) and not has_indexer[layers[0]]):
            source = indexer_of(args, first + 1) - 1
            raise UsageError(
                f"{role}: --pipeline-model-parallel-size {args.pipeline_model_parallel_size}: stage {stage} begins "
                f"with layer {first}, which uses the keys that layer {source} chooses; allowed are stages that begin "
                f"with layers that choose, before this one layer {source}"
            )


class LayerKind(NamedTuple):
    """What a layer has instead of an MLP, and instead of attention; whether it has both halves."""

    is_moe: bool = False
    is_recurrent: bool = False
    has_mixer: bool = True  # attention or a recurrent state
    has_mlp: bool = True  # or experts
    has_indexer: bool = False  # which chooses the keys of this layer's queries, and of those of layers that share it


DENSE = LayerKind()


def layer_kinds(args) -> tuple[LayerKind, ...]:
    """Returns the kind of each layer of the whole model."""
    if args.hybrid_layer_pattern:
        return _kinds_of_letters(args.hybrid_layer_pattern)
    patterns = moe_layer_pattern(args), recurrent_layer_pattern(args), indexer_pattern(args)
    return _kinds_of_patterns(*map(tuple, patterns))


@functools.cache  # the planner asks thousands of times
def _kinds_of_letters(letters: str) -> tuple[LayerKind, ...]:
    """One half a layer: of experts, a recurrence, attention or an MLP."""
    return tuple(LayerKind(part == "E", part == "M", part in "M*", part in "-E") for part in letters)


@functools.cache
def _kinds_of_patterns(*patterns: tuple[bool, ...]) -> tuple[LayerKind, ...]:
    experts, recurrent, indexers = patterns
    kinds = zip(experts, recurrent, indexers, strict=True)
    return tuple(LayerKind(is_moe, is_recurrent, has_indexer=has) for is_moe, is_recurrent, has in kinds)


def prediction_kind(args) -> LayerKind:
    """Returns the kind of the layer of multi-token prediction: that of the model's last one, always with attention, and
    with an indexer if a layer has one."""
    return layer_kinds(args)[-1]._replace(is_recurrent=False, has_indexer=any(indexer_pattern(args)))


def layers_of_chunk(config, stage: int, virtual_stage: int | None) -> range:
    """Returns the layers of one chunk of a pipeline stage, numbered from 0 over the whole model."""
    first = get_transformer_layer_offset(config, vp_stage=virtual_stage, pp_rank=stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage=virtual_stage, pp_rank=stage))


def virtual_stage_numbers(args) -> list[int | None]:
    """Returns the virtual stages of a pipeline stage's chunks; [None] without virtual pipeline parallelism."""
    virtual = args.virtual_pipeline_model_parallel_size
    return list(range(virtual)) if virtual else [None]


def stage_layers(args) -> tuple[tuple[range, ...], ...]:
    """Returns a range of layers for each chunk of every pipeline stage, numbered from 0 over the whole model."""
    return _stage_layers(tuple(getattr(args, flag) for flag in DIVISION))


# What divides layers among pipeline stages: flag -> its name in a model's config, which Megatron reads.
DIVISION = {
    "num_layers": "num_layers",
    "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split": "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split": "account_for_loss_in_pipeline_split",
}


@functools.cache  # the planner asks thousands of times
def _stage_layers(values: tuple) -> tuple[tuple[range, ...], ...]:
    config = SimpleNamespace(**dict(zip(DIVISION.values(), values, strict=True)), pipeline_model_parallel_layout=None)
    return tuple(
        tuple(layers_of_chunk(config, stage, chunk) for chunk in virtual_stage_numbers(config))
        for stage in range(config.pipeline_model_parallel_size)
    )
