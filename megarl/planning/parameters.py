"""Parameters in closed form: every weight of a model chunk on one rank, in Megatron's order.

Symbols: H hidden size, D channels of a head, A heads, G query groups, L channels of a latent, F ffn size (input doubled
when gated), V the padded vocabulary, E experts; t, e and x the tensor-, expert- and expert-tensor-parallel sizes.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from megarl.mcore.config.megatron_flags import parallel_sizes
from megarl.mcore.config.model_flags import is_gated
from megarl.mcore.config.optimizer_flags import is_frozen, layout_free
from megarl.mcore.model.gpt import padded_vocab_size
from megarl.mcore.model.pipeline_layout import LayerKind, layer_kinds, prediction_kind, stage_layers
from megarl.mcore.model.projections import HeadLayout, latent_projections
from megarl.mcore.parallel.process_groups import ParallelSizes
from megarl.mcore.recurrence.delta_rule import HeadSizes
from megarl.mcore.recurrence.rule import layer_sizes

LAYERS = "decoder.layers."  # prefix of the names of transformer layers
KEYS = 64  # of the latest namespaces
CACHED = 8  # models: a plan asks for the weights of each of its roles several times
RECOMPUTE = "recompute"  # prefix of attributes, which a search varies; weights depend on none of the next ones
NO_WEIGHTS = (RECOMPUTE, "sequence_parallel", "use_distributed_optimizer")
T = TypeVar("T")
SCALAR_HEAD = ("value", "reward model")  # kinds (see `memory.stage_memory`) with one output per token


class Weight(NamedTuple):
    """One parameter tensor of a rank: first dimension, elements, bytes per element, and how it is reduced."""

    name: str
    rows: int
    elements: int
    itemsize: int
    is_expert: bool = False  # reduced over expert-data-parallel ranks
    is_shared: bool = False  # embedding tied across pipeline stages: in a separate bucket
    is_routed: bool = False  # of a routed expert, used only by the tokens routed to it


def stage_weights(args, vocab_size: int, value_head: bool) -> list[list[list[Weight]]]:
    """Weights of every pipeline stage, chunk by chunk, as each rank of the stage holds them; not to be changed."""
    return _stage_weights(ModelKey.of_weights(args), vocab_size, value_head)


@dataclass(frozen=True)
class ModelKey:
    """Megatron's namespace as a key of a cache: equal if all values are that a result depends on."""

    args: Any = field(compare=False)
    values: str

    @classmethod
    def of_weights(cls, args) -> "ModelKey":
        """The key of what depends on weights alone, which a rollout has as the actor has them."""
        return cls._of(args, NO_WEIGHTS)

    @classmethod
    def of_gradients(cls, args) -> "ModelKey":
        """The key of what depends on weights, gradients and optimizer states: not on what is recomputed."""
        return cls._of(args, (RECOMPUTE,))

    @classmethod
    def _of(cls, args, left_out: tuple[str, ...]) -> "ModelKey":
        """Made once for each of the latest namespaces, which are not changed."""
        at = (id(args), left_out)
        if at not in _keys:  # a key holds its namespace, so that no other one gets its id
            if len(_keys) >= KEYS:
                _keys.clear()
            values = {name: each for name, each in vars(args).items() if not name.startswith(left_out)}
            _keys[at] = cls(args, repr(values))
        return _keys[at]


_keys: dict[tuple[int, tuple[str, ...]], ModelKey] = {}


@functools.lru_cache(maxsize=CACHED)
def _stage_weights(model: ModelKey, vocab_size: int, value_head: bool) -> list[list[list[Weight]]]:
    """Equal chunks are the same list."""
    args = model.args
    sizes, stages, kinds = parallel_sizes(args), stage_layers(args), layer_kinds(args)
    last = (len(stages) - 1, len(stages[-1]) - 1)
    made: dict[tuple, list[Weight]] = {}

    def chunk(layers: range, is_first: bool, is_last: bool) -> list[Weight]:
        key = (tuple(kinds[layer] for layer in layers), is_first, is_last, _first_number(args, layers))
        if key not in made:
            made[key] = _chunk(args, vocab_size, value_head, layers, is_first, is_last, sizes)
        return made[key]

    return [
        [chunk(layers, (s, c) == (0, 0), (s, c) == last) for c, layers in enumerate(chunks)]
        for s, chunks in enumerate(stages)
    ]


def of_stages(stages: list[list[list[Weight]]], compute: Callable[[list[list[Weight]], int], T]) -> list[T]:
    """`compute(chunks, stage)` of each stage, once for stages with equal chunks; only the first stage is told apart."""
    found: dict[tuple, T] = {}
    keys = [(stage == 0, *map(id, chunks)) for stage, chunks in enumerate(stages)]
    for stage, key in enumerate(keys):
        if key not in found:
            found[key] = compute(stages[stage], stage)
    return [found[key] for key in keys]


def _first_number(args, layers: range) -> int:
    """The number of a chunk's first layer in names: in the whole model if a role freezes parameters by name, else 0."""
    return layers.start if args.freeze else 0


class ParameterTotals(NamedTuple):
    """Parameters of a whole model, of one token's forward, and of the rank that holds most."""

    total: int
    active: int
    largest_rank: int


def parameter_totals(args, vocab_size: int, value_head: bool) -> ParameterTotals:
    """Counts of a role's model: total = all weights; active = total − (1 − k/E) · routed experts."""
    return _parameter_totals(ModelKey.of_weights(args), vocab_size, value_head)


@functools.lru_cache(maxsize=CACHED)
def _parameter_totals(model: ModelKey, vocab_size: int, value_head: bool) -> ParameterTotals:
    args = model.args
    unsplit, kinds = ParallelSizes(), layer_kinds(args)
    weights = [(1, _chunk(args, vocab_size, value_head, range(0), True, True, unsplit))]
    weights += [(kinds.count(kind), _layer(args, unsplit, kind)) for kind in set(kinds)]
    total = sum(times * w.elements for times, module in weights for w in module)
    routed = sum(times * w.elements for times, module in weights for w in module if w.is_routed)
    idle = routed * (args.num_experts - args.moe_router_topk) // args.num_experts if routed else 0
    stages = _stage_weights(model, vocab_size, value_head)
    ranks = of_stages(stages, lambda chunks, _: sum(w.elements for c in chunks for w in c))
    return ParameterTotals(total, total - idle, max(ranks))


def _whole_model(args, vocab_size: int, value_head: bool) -> list[Weight]:
    """All weights of a role's model, as one rank would hold them."""
    return _chunk(args, vocab_size, value_head, range(args.num_layers), True, True, ParallelSizes())


def layout_free_names(args, value_head: bool) -> list[str]:
    """The names that patterns are matched with (`optimizer_flags`), each once."""
    return list(dict.fromkeys(layout_free(weight.name) for weight in _whole_model(args, 1, value_head)))


def frozen_total(args, vocab_size: int, value_head: bool) -> int:
    """Parameters of a role's model that `--freeze` excludes from training."""
    weights = _whole_model(args, vocab_size, value_head) if args.freeze else []
    return sum(weight.elements for weight in weights if is_frozen(args, layout_free(weight.name)))


def _chunk(args, vocab_size: int, value_head: bool, layers: range, first: bool, last: bool, sizes) -> list[Weight]:
    hidden, vocab = args.hidden_size, padded_vocab_size(args, vocab_size) // sizes.tensor
    is_tied = not args.untie_embeddings_and_output_weights and not value_head
    is_shared = is_tied and sizes.pipeline > 1
    weights = []
    if first:
        weights.append(_weight(args, "embedding.word_embeddings.weight", vocab, hidden, is_shared))
        if args.position_embedding_type == "learned_absolute":
            weights.append(_weight(args, "embedding.position_embeddings.weight", args.max_position_embeddings, hidden))
    kinds = layer_kinds(args)
    of_kind = {kind: _layer(args, sizes, kind) for kind in {kinds[layer] for layer in layers}}
    for number, layer in enumerate(layers, _first_number(args, layers)):
        weights += [Weight(f"{LAYERS}{number}.{w.name}", *w[1:]) for w in of_kind[kinds[layer]]]
    if last:
        weights += _norm(args, "decoder.final_layernorm", hidden)
        if value_head:
            weights += _matrix(args, "output_layer", 1, hidden, has_bias=args.draws_weights)
        elif not is_tied or not first:
            weights.append(_weight(args, "output_layer.weight", vocab, hidden, is_shared))
    return weights


def prediction_weights(args) -> list[Weight]:
    """Weights of the layer of multi-token prediction on a rank, in Megatron's order; none without one."""
    if not args.predicts:
        return []
    hidden, prefix = args.hidden_size, "mtp.layers.0."
    weights = [weight for name in ("enorm", "hnorm", "final_layernorm") for weight in _norm(args, name, hidden)]
    weights += _matrix(args, "eh_proj", hidden, 2 * hidden, False)
    layer = _layer(args, parallel_sizes(args), prediction_kind(args))
    weights += [w._replace(name=f"mtp_model_layer.{w.name}") for w in layer]
    return [w._replace(name=prefix + w.name) for w in weights]


def _layer(args, sizes: ParallelSizes, kind: LayerKind) -> list[Weight]:
    """Attention or a recurrence; an MLP or a mixture of experts; a norm of each of the two that the layer has."""
    hidden, t, has_first_norms, weights = args.hidden_size, sizes.tensor, args.layernorm_position != "post", []
    if kind.has_mixer:
        weights += _norm(args, "input_layernorm", hidden) if has_first_norms else []
        weights += _mixer(args, t, kind)
    if kind.has_mlp:
        weights += _norm(args, "pre_mlp_layernorm", hidden) if has_first_norms else []
        weights += _moe(args, sizes) if kind.is_moe else _mlp(args, "mlp", args.ffn_hidden_size // t)
    if args.layernorm_position != "pre":
        weights += _norm(args, "post_self_attn_layernorm", hidden) + _norm(args, "post_mlp_layernorm", hidden)
    return weights


def _mixer(args, t: int, kind: LayerKind) -> list[Weight]:
    """What a layer has instead of an MLP."""
    if kind.is_recurrent:
        return _delta_net(args, t) if args.hybrid_layer_pattern is None else _mamba(args, t)
    return _latent_attention(args, t) if args.multi_latent_attention else _attention(args, t)


def _mamba(args, t: int) -> list[Weight]:
    """Three numbers of each head in fp32; z, x, B, C and the steps; a convolution of x, B and C; a norm of I/t."""
    sizes, name = layer_sizes(args, t), "self_attention."
    heads, values = sizes.heads, sizes.heads * sizes.values
    weights = [Weight(name + each, heads, heads, 4) for each in ("dt_bias", "A_log", "D")]
    weights += _matrix(args, f"{name}in_proj", sum(sizes.parts.values()), args.hidden_size, False)
    weights += _matrix(args, f"{name}out_proj", args.hidden_size, values, False)
    weights += _matrix(args, f"{name}conv1d", sizes.channels, args.linear_conv_kernel_dim, True)
    return [*weights, _weight(args, f"{name}norm.weight", values)]


def _delta_net(args, t: int) -> list[Weight]:
    """Decays and their biases in fp32; queries, keys, values, gates and two numbers of each head; a convolution of the
    first three; a norm of a head."""
    sizes = HeadSizes.of(args, t)
    heads, values = sizes.heads, sizes.parts["value"]
    name, hidden = "self_attention.", args.hidden_size
    weights = [Weight(name + each, heads, heads, 4) for each in ("dt_bias", "A_log")]
    weights += _matrix(args, f"{name}in_proj", sum(sizes.parts.values()), hidden, False)
    weights += _matrix(args, f"{name}out_proj", hidden, values, False)
    weights += _matrix(args, f"{name}conv1d", sizes.channels, args.linear_conv_kernel_dim, False)
    return weights + _norm(args, f"{name}out_norm", sizes.values)


def _attention(args, t: int) -> list[Weight]:
    """(A + 2G)·D·H/t, with gates (2A + 2G)·D·H/t, and A·D·H/t."""
    channels, heads, has_bias = args.kv_channels, args.num_attention_heads, args.add_bias_linear
    layout, hidden = HeadLayout.of(args), args.hidden_size
    weights = _matrix(args, "self_attention.linear_proj", hidden, heads * channels // t, has_bias)
    rows = (heads * (1 + args.attention_output_gate) + 2 * layout.groups) * channels // t
    weights += _matrix(args, "self_attention.linear_qkv", rows, hidden, has_bias or args.add_qkv_bias)
    if args.softmax_type == "learnable":
        weights.append(_weight(args, "self_attention.core_attention.softmax_offset", heads // t))
    if args.qk_layernorm:
        weights += _norm(args, "self_attention.q_layernorm", channels)
        weights += _norm(args, "self_attention.k_layernorm", channels)
    if args.qk_layernorm_all_heads:
        weights += _norm(args, "self_attention.q_norm", heads * channels // t)
        splits = 1 if layout.ranks_of_group(t) > 1 else t  # whole where ranks share a group
        weights += _norm(args, "self_attention.k_norm", layout.groups * channels // splits)
    return weights


def _latent_attention(args, t: int) -> list[Weight]:
    """Latents of L and r channels on every rank; from them, Q query latents and the values, the heads of this rank."""
    hidden, heads, latent = args.hidden_size, args.num_attention_heads // t, args.kv_lora_rank
    queries, width = args.q_lora_rank, heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
    weights = _matrix(args, "self_attention.linear_proj", hidden, heads * args.v_head_dim, args.add_bias_linear)
    norms = {name: _norm(args, f"self_attention.{name}_layernorm", size) if args.qk_layernorm and size else []
             for name, size in (("q", queries), ("kv", latent))}  # fmt: skip
    if queries is None:
        weights += _matrix(args, "self_attention.linear_q_proj", width, hidden, False)
    else:
        weights += _matrix(args, "self_attention.linear_q_down_proj", queries, hidden, False) + norms["q"]
        weights += _matrix(args, "self_attention.linear_q_up_proj", width, queries, False)
    down = latent + args.qk_pos_emb_head_dim
    weights += _matrix(args, "self_attention.linear_kv_down_proj", down, hidden, False) + norms["kv"]
    up = heads * (args.qk_head_dim + args.v_head_dim)
    return weights + _matrix(args, "self_attention.linear_kv_up_proj", up, latent, False)


def _mlp(args, name: str, ffn: int, width: int | None = None) -> list[Weight]:
    """H·F in (twice when gated), F·H out, for the `ffn` channels of this rank; H is `width` if it is given."""
    gates, bias, width = 2 if is_gated(args) else 1, args.add_bias_linear, width or args.hidden_size
    fc1 = _matrix(args, f"{name}.linear_fc1", gates * ffn, width, bias)
    return fc1 + _matrix(args, f"{name}.linear_fc2", width, ffn, bias)


def _moe(args, sizes: ParallelSizes) -> list[Weight]:
    """Router E·H; projections to and from latents; E/e experts with F/x channels; one shared expert, split like a dense
    MLP, and its gate."""
    experts, hidden = args.num_experts, args.hidden_size
    weights = _matrix(args, "mlp.router", experts, hidden, args.add_bias_linear)
    for name, size in latent_projections(args).items():
        weights += _matrix(args, f"mlp.{name}", *size, has_bias=False)
    is_expert = args.expert_model_parallel_size > 1  # without expert parallelism, reduced like all others
    for number in range(experts // sizes.expert):
        ffn = args.moe_ffn_hidden_size // sizes.expert_tensor
        expert = _mlp(args, f"mlp.experts.local_experts.{number}", ffn, args.moe_latent_size)
        weights += [w._replace(is_expert=is_expert, is_routed=True) for w in expert]
    shared = args.moe_shared_expert_intermediate_size
    if shared:
        if args.moe_shared_expert_gate:
            weights.append(_weight(args, "mlp.shared_experts.gate_weight", 1, hidden))
        weights += _mlp(args, "mlp.shared_experts", shared // sizes.tensor)
    return weights


def _matrix(args, name: str, rows: int, columns: int, has_bias: bool) -> list[Weight]:
    bias = [_weight(args, f"{name}.bias", rows)] if has_bias else []
    return [_weight(args, f"{name}.weight", rows, columns), *bias]


def _norm(args, name: str, width: int) -> list[Weight]:
    kinds = ("weight",) if args.normalization == "RMSNorm" else ("weight", "bias")
    return [_weight(args, f"{name}.{kind}", width) for kind in kinds]


def _weight(args, name: str, rows: int, columns: int = 1, is_shared: bool = False) -> Weight:
    itemsize = args.params_dtype.itemsize
    return Weight(name=name, rows=rows, elements=rows * columns, itemsize=itemsize, is_shared=is_shared)


def is_half(args) -> bool:
    """Whether a role's weights are kept in 16 bits, with fp32 copies in its optimizer."""
    return args.params_dtype != torch.float32
