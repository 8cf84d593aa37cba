"""Layer specs, one module each, chosen by `--transformer-impl NAME`: a new spec is a new module in this folder.

A module has two names: `layer_spec(args, kind)` and `final_norm`. All specs have megarl's own layer, attention and core
attention in common, which `put_own_parts` puts into Megatron's spec.
"""

import importlib

import torch.distributed as dist
from megatron.core.ssm.gated_delta_net.common import GatedDeltaNetSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megarl.mcore.attention.backends import PackedAttention, ScoredAttention
from megarl.mcore.config.model_flags import has_score_options
from megarl.mcore.model.decoder_layer import (
    AllHeadsNormAttention,
    DecoderLayer,
    PagedSelfAttention,
    PostNormLayer,
)
from megarl.mcore.model.latent_attention import LatentAttention
from megarl.mcore.model.pipeline_layout import LayerKind, layer_kinds, layers_of_chunk
from megarl.mcore.model.recurrent_mixer import GatedDeltaNet, KimiDelta, Mamba2
from megarl.mcore.model.sparse_attention import SparseLatentAttention


def block_spec(args, config, pg_collection, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """The layers of one chunk of this rank's pipeline stage, built by the spec that `args.transformer_impl` names."""
    spec = importlib.import_module(f"{__name__}.{args.transformer_impl}")
    pattern = layer_kinds(args)
    specs = {kind: spec.layer_spec(args, kind) for kind in set(pattern)}
    layers = layers_of_chunk(config, dist.get_rank(pg_collection.pp), virtual_stage)
    return TransformerBlockSubmodules(layer_specs=[specs[pattern[i]] for i in layers], layer_norm=spec.final_norm)


def put_own_parts(spec: ModuleSpec, args, kind: LayerKind):
    """Puts megarl's layer, attention and core attention into Megatron's spec of a layer.

    `args`: the role's Megatron namespace.
    """
    attention = spec.submodules.self_attention
    spec.module = DecoderLayer if args.layernorm_position == "pre" else PostNormLayer
    if kind.is_recurrent:
        first = "linear_kv_up_proj" if args.multi_latent_attention else "linear_qkv"
        linears = attention.submodules
        parts = GatedDeltaNetSubmodules(getattr(linears, first), out_proj=linears.linear_proj)
        delta_net = KimiDelta if args.linear_channel_decay else GatedDeltaNet
        kind_of_mixer = delta_net if args.hybrid_layer_pattern is None else Mamba2
        spec.submodules.self_attention = ModuleSpec(kind_of_mixer, submodules=parts)
        return
    attention.module = _attention_kind(args)
    attention.submodules.core_attention = ScoredAttention if has_score_options(args) else PackedAttention


def _attention_kind(args) -> type:
    """The class of attention in layers without a recurrent state."""
    if args.multi_latent_attention:
        return LatentAttention if args.dsa_indexer_topk is None else SparseLatentAttention
    return AllHeadsNormAttention if args.qk_layernorm_all_heads else PagedSelfAttention
