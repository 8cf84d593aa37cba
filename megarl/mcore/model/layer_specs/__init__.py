"""Layer specs, one module each, chosen by `--transformer-impl NAME`: a new spec is a new module in this folder."""

import importlib

import torch.distributed as dist
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megarl.mcore.model.pipeline_layout import layer_kinds, layers_of_chunk


def block_spec(args, config, pg_collection, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one chunk of this rank's pipeline stage, built by the spec that `args.transformer_impl` names."""
    spec = importlib.import_module(f"{__name__}.{args.transformer_impl}")
    pattern = layer_kinds(args)
    specs = {kind: spec.layer_spec(args, kind) for kind in set(pattern)}
    layers = layers_of_chunk(config, dist.get_rank(pg_collection.pp), virtual_stage)
    return TransformerBlockSubmodules(layer_specs=[specs[pattern[i]] for i in layers], layer_norm=spec.final_norm)
