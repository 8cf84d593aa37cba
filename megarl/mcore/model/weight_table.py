"""The weights of a model by its flags alone: names, shapes and order of Megatron's parameters, and their keys in a
checkpoint.

The planner, the checks of checkpoints, and import and export of Hugging Face folders read this table. Symbols: H hidden
size, D channels of a head, A heads, G query groups, L channels of a latent, F ffn size (input doubled when gated), V
the padded vocabulary, E experts; t, e and x the tensor-, expert- and expert-tensor-parallel sizes.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from megarl.mcore.model.pipeline_layout import LayerKind, layer_kinds, prediction_kind
from megarl.mcore.model.projections import (
    HeadLayout,
    Sizes,
    attention_sizes,
    expert_sizes,
    latent_projections,
    linear_sizes,
    mlp_sizes,
)
from megarl.mcore.moe.router import balancing_state
from megarl.mcore.parallel.process_groups import ParallelSizes
from megarl.mcore.recurrence import layer_sizes
from megarl.mcore.recurrence.state_space import CONVOLVED, SpaceSizes

EMBEDDING, HEAD, HEAD_BIAS = "embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"
LAYERS = "decoder.layers."  # prefix of transformer layers
PREDICTED, PREDICTED_LAYER = "mtp.layers.0.", "mtp.layers.0.mtp_model_layer."  # of multi-token prediction
ATTENDED, MIXED = "self_attention.linear_proj", "self_attention.out_proj"  # output of attention, of a recurrent layer
INDEXER = "core_attention.indexer"  # named as in Megatron
ROW_PARALLEL = (ATTENDED, MIXED, "linear_fc2")  # ranks have a share of their columns
WHOLE = ("linear_q_down_proj", "linear_kv_down_proj")  # on every rank
UNSPLIT = ParallelSizes()
EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
PARTED = re.compile(r"self_attention\.(in_proj|conv1d)\.(weight|bias)")  # parts are tensors of their own in checkpoints


class Weight(NamedTuple):
    """One parameter of a rank: its shape, bytes per element, and how it is reduced."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    is_expert: bool = False  # reduced over expert-data-parallel ranks
    is_shared: bool = False  # embedding tied across pipeline stages: in a separate bucket
    is_routed: bool = False  # of a routed expert, used only by the tokens routed to it
    layers: tuple[int, ...] = ()  # of a module of transformers that have it

    @property
    def layer(self) -> int | None:
        """The transformer layer with which FSDP gathers it."""
        if self.name.startswith(LAYERS):
            return int(self.name.split(".")[2])
        return self.layers[0] if self.layers else None

    @property
    def rows(self) -> int:
        """Size of the first dimension."""
        return self.shape[0]

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


class StoredWeight(NamedTuple):
    """One tensor of one layer or expert under its key in a checkpoint."""

    key: str  # `decoder.layers.N.…`, also where a checkpoint stacks the layers
    expert: int | None
    shape: tuple[int, ...]


def padded_vocab_size(args, vocab_size: int) -> int:
    """Vocabulary size padded to `--make-vocab-size-divisible-by`, the same for every tensor-parallel size."""
    divisor = args.make_vocab_size_divisible_by
    return -(-vocab_size // divisor) * divisor


def head_weights(args, vocab_size: int, value_head: bool, has_embedding: bool, sizes: ParallelSizes) -> list[Weight]:
    """The weights after the last layer. `has_embedding`: whether a tied one is in the same chunk."""
    hidden, weights = args.hidden_size, _norm(args, "decoder.final_layernorm", args.hidden_size)
    if value_head:
        return weights + _linear(args, "output_layer", (1, hidden), args.draws_weights)
    is_tied = not args.untie_embeddings_and_output_weights
    if not is_tied or not has_embedding:
        rows = padded_vocab_size(args, vocab_size) // sizes.tensor
        weights.append(_weight(args, HEAD, rows, hidden)._replace(is_shared=is_tied and sizes.pipeline > 1))
    return weights


def embedding_weights(args, vocab_size: int, value_head: bool, sizes: ParallelSizes) -> list[Weight]:
    """The weights before the first layer."""
    is_tied, hidden = not args.untie_embeddings_and_output_weights and not value_head, args.hidden_size
    rows = padded_vocab_size(args, vocab_size) // sizes.tensor
    weights = [_weight(args, EMBEDDING, rows, hidden)._replace(is_shared=is_tied and sizes.pipeline > 1)]
    if args.position_embedding_type == "learned_absolute":
        weights.append(_weight(args, "embedding.position_embeddings.weight", args.max_position_embeddings, hidden))
    return weights


def layer_weights(args, kind: LayerKind, sizes: ParallelSizes = UNSPLIT) -> list[Weight]:
    """The weights of a layer on a rank: attention or a recurrence; an MLP or a mixture of experts; norms of those that
    the layer has."""
    hidden, has_first_norms, weights = args.hidden_size, args.layernorm_position != "post", []
    if kind.has_mixer:
        weights += _norm(args, "input_layernorm", hidden) if has_first_norms else []
        mixer = _recurrence if kind.is_recurrent else _latents if args.multi_latent_attention else _attention
        weights += (_indexer(args, sizes.tensor) if kind.has_indexer else []) + mixer(args, sizes.tensor)
    if kind.has_mlp:
        weights += _norm(args, "pre_mlp_layernorm", hidden) if has_first_norms else []
        mlp = mlp_sizes(args, args.ffn_hidden_size)
        weights += _experts(args, sizes) if kind.is_moe else _mlp(args, "mlp.", mlp, sizes.tensor)
    if args.layernorm_position != "pre":
        weights += _norm(args, "post_self_attn_layernorm", hidden) + _norm(args, "post_mlp_layernorm", hidden)
    return weights


def prediction_weights(args, sizes: ParallelSizes) -> list[Weight]:
    """The weights of the layer of multi-token prediction on a rank, without the embedding and head that it shares; none
    without one."""
    if not args.predicts:
        return []
    hidden = args.hidden_size
    weights = [weight for name in ("enorm", "hnorm", "final_layernorm") for weight in _norm(args, name, hidden)]
    weights.append(_weight(args, "eh_proj.weight", hidden, 2 * hidden))
    layer = layer_weights(args, prediction_kind(args), sizes)
    weights += [weight._replace(name=f"mtp_model_layer.{weight.name}") for weight in layer]
    return [weight._replace(name=PREDICTED + weight.name) for weight in weights]


def _recurrence(args, t: int) -> list[Weight]:
    """Two or three numbers of each head in fp32; the first projection; a convolution of some of its rows; a norm.

    A gated delta net: queries, keys, values, gates and two numbers of each head, or one and decays of channels; the
    first three are convolved; a norm of a head. Gates and decays may come from latents, which are on every rank.
    Mamba-2: z, x, B, C and the steps; x, B and C are convolved; a norm of all heads of the rank.
    """
    sizes, name, hidden = layer_sizes(args, t), "self_attention.", args.hidden_size
    is_space, values = isinstance(sizes, SpaceSizes), sizes.heads * sizes.values
    of_heads = ("dt_bias", "A_log", "D") if is_space else ("dt_bias", "A_log")
    counts = {"dt_bias": sizes.heads * sizes.decays}
    weights = [Weight(name + each, (counts.get(each, sizes.heads),), 4) for each in of_heads]
    weights.append(_weight(args, f"{name}in_proj.weight", sum(sizes.parts.values()), hidden))
    weights.append(_weight(args, f"{name}out_proj.weight", hidden, values))
    weights.append(_weight(args, f"{name}conv1d.weight", sizes.channels, 1, args.linear_conv_kernel_dim))
    if not isinstance(sizes, SpaceSizes):
        weights += _norm(args, f"{name}out_norm", sizes.values)
        if rank := sizes.gate_rank:
            weights.append(_weight(args, f"{name}latent_proj.weight", len(sizes.latents) * rank, hidden))
        return weights + [
            _weight(args, f"{name}{x}_proj.weight", sizes.wide[x], sizes.gate_rank) for x in sizes.latents
        ]
    weights.append(_weight(args, f"{name}conv1d.bias", sizes.channels))
    return [*weights, _weight(args, f"{name}norm.weight", values)]


def _attention(args, t: int) -> list[Weight]:
    """(A + 2G)·D·H/t, with gates (2A + 2G)·D·H/t, and A·D·H/t."""
    layout, channels, has_bias = HeadLayout.of(args), args.kv_channels, args.add_bias_linear
    qkv, attended = linear_sizes(args, attention_sizes(args)).values()
    weights = _linear(args, ATTENDED, attended, has_bias, t)
    weights += _linear(args, "self_attention.linear_qkv", qkv, has_bias or args.add_qkv_bias, t)
    if args.softmax_type == "learnable":
        weights.append(_weight(args, "self_attention.core_attention.softmax_offset", args.num_attention_heads // t))
    if args.qk_layernorm:
        weights += _norm(args, "self_attention.q_layernorm", channels)
        weights += _norm(args, "self_attention.k_layernorm", channels)
    if args.qk_layernorm_all_heads:
        weights += _norm(args, "self_attention.q_norm", args.num_attention_heads * channels // t)
        splits = 1 if layout.ranks_of_group(t) > 1 else t  # whole where ranks share a group
        weights += _norm(args, "self_attention.k_norm", layout.groups * channels // splits)
    return weights


def _latents(args, t: int) -> list[Weight]:
    """Latents of L and r channels on every rank, with norms; from them, Q query latents and the values, the heads of
    this rank; perhaps a gate of each head."""
    norms = {"linear_q_down_proj": ("q", args.q_lora_rank), "linear_kv_down_proj": ("kv", args.kv_lora_rank)}
    weights: list[Weight] = []
    for name, size in linear_sizes(args, attention_sizes(args)).items():
        weights += _linear(args, name, size, args.add_bias_linear and name == ATTENDED, t)
        latent, width = norms.get(name.rpartition(".")[2], ("", 0))
        if args.qk_layernorm and latent:
            weights += _norm(args, f"self_attention.{latent}_layernorm", width)
    return weights


def _indexer(args, t: int) -> list[Weight]:
    """Of I heads with C channels: I·C·Q/t, and on every rank C·H with a norm that has a bias, and I·H."""
    heads, channels, hidden = args.dsa_indexer_n_heads, args.dsa_indexer_head_dim, args.hidden_size
    shapes = {"linear_wq_b.weight": (heads * channels // t, args.q_lora_rank), "linear_wk.weight": (channels, hidden),
              "k_norm.weight": (channels,), "k_norm.bias": (channels,),
              "linear_weights_proj.weight": (heads, hidden)}  # fmt: skip
    return [_weight(args, f"self_attention.{INDEXER}.{name}", *shape) for name, shape in shapes.items()]


def _mlp(args, name: str, sizes: Sizes, ranks: int) -> list[Weight]:
    """H·F in (twice when gated), F·H out, of which each of some ranks has a share of the channels."""
    weights = []
    for linear, size in linear_sizes(args, sizes).items():
        weights += _linear(args, f"{name}{linear}", size, args.add_bias_linear, ranks)
    return weights


def _experts(args, sizes: ParallelSizes) -> list[Weight]:
    """Router E·H; projections to and from latents; E/e experts with F/x channels; one shared expert, split like a dense
    MLP, and its gate."""
    experts, hidden = args.num_experts, args.hidden_size
    weights = _linear(args, "mlp.router", (experts, hidden), args.add_bias_linear)
    for name, (rows, columns) in latent_projections(args).items():
        weights.append(_weight(args, f"mlp.{name}.weight", rows, columns))
    is_expert = args.expert_model_parallel_size > 1  # without expert parallelism, reduced like all others
    expert = _mlp(args, "", expert_sizes(args), sizes.expert_tensor)
    for number in range(experts // sizes.expert):
        prefix = f"mlp.experts.local_experts.{number}."
        weights += [Weight(prefix + w.name, w.shape, w.itemsize, is_expert, is_routed=True) for w in expert]
    if shared := args.moe_shared_expert_intermediate_size:
        if args.moe_shared_expert_gate:
            weights.append(_weight(args, "mlp.shared_experts.gate_weight", 1, hidden))
        weights += _mlp(args, "mlp.shared_experts.", mlp_sizes(args, shared), sizes.tensor)
    return weights


def _linear(args, name: str, size: tuple[int, int], has_bias: bool, ranks: int = 1) -> list[Weight]:
    """A linear layer of which each of some ranks has a share. `size`: rows and columns of the whole."""
    rows, columns = size
    if name.endswith(ROW_PARALLEL):
        columns //= ranks
    elif not name.endswith(WHOLE):
        rows //= ranks
    weight = _weight(args, f"{name}.weight", rows, columns)
    return [weight, _weight(args, f"{name}.bias", rows)] if has_bias else [weight]


def _norm(args, name: str, width: int) -> list[Weight]:
    kinds = ("weight",) if args.normalization == "RMSNorm" else ("weight", "bias")
    return [_weight(args, f"{name}.{kind}", width) for kind in kinds]


def _weight(args, name: str, *shape: int) -> Weight:
    return Weight(name, shape, args.params_dtype.itemsize)


def stored_weights(args, vocab_size: int, value_head: bool = False) -> Iterator[StoredWeight]:
    """Yields the weights of a language model, or of one with a scalar head, as a checkpoint has them, with RMSNorm.

    Args:
        args: the role's Megatron namespace.
        vocab_size: before padding.
    """
    for weight in embedding_weights(args, vocab_size, value_head, UNSPLIT):
        yield StoredWeight(weight.name, None, weight.shape)
    for number, kind in enumerate(layer_kinds(args)):
        yield from _stored_layer(args, f"{LAYERS}{number}.", kind)
    for weight in head_weights(args, vocab_size, value_head, True, UNSPLIT):
        if weight.name != HEAD_BIAS:  # sequence classification of Hugging Face has none
            yield StoredWeight(weight.name, None, weight.shape)


def stored_prediction(args) -> Iterator[StoredWeight]:
    """Yields the weights of the layer of multi-token prediction, as `stored_weights`."""
    for weight in prediction_weights(args, UNSPLIT):
        if not weight.name.startswith(PREDICTED_LAYER):
            yield StoredWeight(weight.name, None, weight.shape)
    yield from _stored_layer(args, PREDICTED_LAYER, prediction_kind(args))


def _stored_layer(args, prefix: str, kind: LayerKind) -> Iterator[StoredWeight]:
    """The weights of a layer, and what is kept beside them; norms belong to the linear layers after them."""
    keys = {"pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}
    if not args.multi_latent_attention:
        first = "in_proj" if kind.is_recurrent else "linear_qkv"
        keys["input_layernorm.weight"] = f"self_attention.{first}.layer_norm_weight"
    for weight in layer_weights(args, kind):
        if match := EXPERT.fullmatch(weight.name):
            yield StoredWeight(f"{prefix}mlp.experts.experts.{match[2]}", int(match[1]), weight.shape)
        elif match := PARTED.fullmatch(weight.name):
            sizes = layer_sizes(args, 1)
            convolved = CONVOLVED if isinstance(sizes, SpaceSizes) else ("query", "key", "value")
            for part in sizes.parts if match[1] == "in_proj" else convolved:
                yield StoredWeight(f"{prefix}{weight.name}.{part}", None, (sizes.parts[part], *weight.shape[1:]))
        else:
            yield StoredWeight(prefix + keys.get(weight.name, weight.name), None, weight.shape)
    if kind.is_moe and args.moe_router_enable_expert_bias:
        yield StoredWeight(f"{prefix}mlp.router.expert_bias", None, (args.num_experts,))


def weight_shapes(
    role: str, args, vocab_size: int, resumes: bool = False, value_head: bool = False
) -> dict[str, tuple[int, ...] | None]:
    """Returns the global shapes by key that a checkpoint must have to match the role's flags; None: no such key.

    Args:
        resumes: also require the experts' balancing state; without it, a policy may lack it and it starts anew.
        value_head: also require the scalar head.
    """
    if args.model_folder is not None:
        return args.model_folder.checkpoint_shapes(role, value_head)
    hidden, kinds, last = args.hidden_size, layer_kinds(args), args.num_layers - 1
    shapes: dict[str, tuple[int, ...] | None] = {f"{role}.{EMBEDDING}": (padded_vocab_size(args, vocab_size), hidden)}
    if value_head:
        shapes |= {f"{role}.{HEAD}": (1, hidden), f"{role}.{HEAD_BIAS}": (1,) if args.draws_weights else None}
    if args.predicts and args.draws_weights and not args.trains_prediction:  # the layer comes from the checkpoint
        shapes[f"{role}_mtp.{PREDICTED}eh_proj.weight"] = (hidden, 2 * hidden)
    are_alike = len({(kind.is_moe, kind.has_indexer) for kind in kinds}) == 1
    are_alike = are_alike and not any(kind.is_recurrent for kind in kinds)
    stacked = (last + 1,) if are_alike else ()  # as Megatron has layers in a checkpoint

    def require(layer: int, *names: str):
        prefix = f"{role}.{LAYERS}" if stacked else f"{role}.{LAYERS}{layer}."
        for name, shape, *_ in layer_weights(args, kinds[layer]):
            if name in names:
                shapes[prefix + name] = (*stacked, *shape)

    if args.hybrid_layer_pattern is not None:
        require([kind.is_recurrent for kind in kinds].index(True), f"{MIXED}.weight")
        if "-" in args.hybrid_layer_pattern:
            require(args.hybrid_layer_pattern.index("-"), "mlp.linear_fc2.weight")
    else:
        require(last, f"{MIXED}.weight", f"{ATTENDED}.weight")
        if args.dsa_indexer_topk is not None:  # a run with short sequences has none
            require([kind.has_indexer for kind in kinds].index(True), f"self_attention.{INDEXER}.linear_wk.weight")
        if not args.num_experts:
            require(last, "mlp.linear_fc2.weight")
    if not args.num_experts:
        return shapes
    first = [kind.is_moe for kind in kinds].index(True)
    require(first, "mlp.router.weight")
    router = f"{role}.{LAYERS}mlp.router." if stacked else f"{role}.{LAYERS}{first}.mlp.router."
    for name, is_on in balancing_state(args).items():
        if is_on and resumes:
            shapes[router + name] = (*stacked, args.num_experts)
        elif not is_on and name == "expert_bias":  # a policy that had one would route differently without it
            shapes[router + name] = None
    return shapes
