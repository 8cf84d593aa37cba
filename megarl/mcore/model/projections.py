"""The projections of a layer by their names in Hugging Face's models, their sizes, and Megatron's linear layers.

Megatron fuses some: `linear_qkv` keeps, for each key and value group, R·D rows of q (twice with gates), D of k and D of
v; `linear_fc1` all gate rows, then all up rows. `in_proj` of a gated delta net has the rows of `HeadSizes.parts`, of
which families fuse different ones, each a projection; that of Mamba-2 is one projection with the rows of
`SpaceSizes.parts`.
"""

from typing import NamedTuple

from megarl.mcore.config.model_flags import is_gated
from megarl.mcore.config.recurrent_rules import has_states
from megarl.mcore.recurrence import layer_sizes
from megarl.mcore.recurrence.delta_rule import HeadSizes
from megarl.mcore.recurrence.state_space import SpaceSizes

# Suffix of a linear layer's name -> its projections, in the order of its rows.
LINEARS = {
    "self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "self_attention.linear_proj": ("o_proj",),
    "self_attention.linear_q_proj": ("q_proj",),
    "self_attention.linear_q_down_proj": ("q_a_proj",),
    "self_attention.linear_q_up_proj": ("q_b_proj",),
    "self_attention.linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "self_attention.linear_kv_up_proj": ("kv_b_proj",),
    "self_attention.linear_gate": ("g_proj",),
    "self_attention.in_proj": ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_b", "in_proj_a"),
    "self_attention.latent_proj": ("g_a_proj", "f_a_proj"),
    "self_attention.z_proj": ("g_b_proj",),
    "self_attention.alpha_proj": ("f_b_proj",),
    "self_attention.out_proj": ("out_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
IN_PROJ = "self_attention.in_proj"
MAMBA_LINEARS = {IN_PROJ: ("in_proj",)}  # instead of those of a gated delta net

Sizes = dict[str, tuple[int, int]]  # rows and columns of projections by name


class HeadLayout(NamedTuple):
    """Attention heads: G groups of R query heads with one key and one value head, D channels each; and the heads of
    layers with a recurrent state, in models that have them."""

    groups: int
    queries: int  # per group
    channels: int
    recurrent: HeadSizes | SpaceSizes | None = None
    has_gates: bool = False  # of the output: Megatron fuses those of a group after its queries

    @classmethod
    def of(cls, args) -> "HeadLayout":
        """That of a role's Megatron namespace."""
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        recurrent = layer_sizes(args, 1) if has_states(args) else None
        gates = bool(args.attention_output_gate)
        return cls(groups, args.num_attention_heads // groups, args.kv_channels, recurrent, gates)

    @classmethod
    def of_config(cls, config) -> "HeadLayout":
        """That of Megatron's config of a model."""
        groups, gates = config.num_query_groups, bool(config.attention_output_gate)
        return cls(groups, config.num_attention_heads // groups, config.kv_channels, None, gates)

    @property
    def heights(self) -> tuple[int, int, int]:
        """Rows of q, k and v of a group in `linear_qkv`, in heads."""
        return self.queries * (1 + self.has_gates), 1, 1

    def ranks_of_group(self, tensor_ranks: int) -> int:
        """Tensor-parallel ranks that share a group; 1: each has whole groups."""
        return max(1, tensor_ranks // self.groups)

    def groups_of_rank(self, tensor_ranks: int) -> int:
        """Groups whose keys and values a tensor-parallel rank has."""
        return max(1, self.groups // tensor_ranks)


def linears_of(args) -> dict[str, tuple[str, ...]]:
    """Those of `LINEARS` that a model has; of multi-latent attention perhaps more. `args`: its Megatron namespace."""
    absent = "self_attention.linear_qkv" if args.multi_latent_attention else "self_attention.linear_q_proj"
    found = {suffix: names for suffix, names in LINEARS.items() if suffix != absent}  # both have a q_proj
    if args.hybrid_layer_pattern is None and has_states(args):
        return found | {IN_PROJ: tuple(projections_by_part(layer_sizes(args, 1)).values())}
    return found if args.hybrid_layer_pattern is None else found | MAMBA_LINEARS


def projections_by_part(sizes: HeadSizes | SpaceSizes) -> dict[str, str]:
    """The projections in the first one of a gated delta net by the names of its parts."""
    names = dict(zip(sizes.wide, LINEARS[IN_PROJ], strict=True))
    return {part: names[part] for part in sizes.parts}


def attention_sizes(args) -> Sizes:
    """Sizes of the attention's projections in a model with this Megatron namespace."""
    if args.multi_latent_attention:
        return _latent_attention_sizes(args)
    hidden, heads = args.hidden_size, HeadLayout.of(args)
    attended = heads.groups * heads.queries * heads.channels
    # With gates of the output, q_proj has their rows, too.
    sizes = {"q_proj": (attended * (1 + args.attention_output_gate), hidden), "o_proj": (hidden, attended)}
    return sizes | dict.fromkeys(("k_proj", "v_proj"), (heads.groups * heads.channels, hidden))


def _latent_attention_sizes(args) -> Sizes:
    """Queries come from the hidden states or a latent of them, keys and values from a latent that all heads share."""
    hidden, heads = args.hidden_size, args.num_attention_heads
    latent, queries = args.kv_lora_rank, args.q_lora_rank
    width, attended = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim), heads * args.v_head_dim
    sizes = {
        "kv_a_proj_with_mqa": (latent + args.qk_pos_emb_head_dim, hidden),
        "kv_b_proj": (heads * args.qk_head_dim + attended, latent),
        "o_proj": (hidden, attended),
    }
    sizes |= {"g_proj": (heads, hidden)} if args.attention_output_gate else {}
    of_queries = {"q_a_proj": (queries, hidden), "q_b_proj": (width, queries)}
    return sizes | ({"q_proj": (width, hidden)} if queries is None else of_queries)


def recurrent_sizes(args) -> Sizes:
    """Sizes of the projections of a layer with a recurrent state in a model with this Megatron namespace."""
    sizes, hidden = layer_sizes(args, 1), args.hidden_size
    found = {"out_proj": (hidden, sizes.heads * sizes.values)}
    if isinstance(sizes, SpaceSizes):
        return found | {"in_proj": (sum(sizes.parts.values()), hidden)}
    if sizes.gate_rank:
        found |= dict.fromkeys(("g_a_proj", "f_a_proj"), (sizes.gate_rank, hidden))
        found |= {"g_b_proj": (sizes.wide["z"], sizes.gate_rank), "f_b_proj": (sizes.wide["alpha"], sizes.gate_rank)}
    return found | {name: (sizes.parts[part], hidden) for part, name in projections_by_part(sizes).items()}


def mlp_sizes(args, ffn: int, width: int | None = None) -> Sizes:
    """Sizes of the projections of an MLP with `ffn` channels in a model with this Megatron namespace.

    `width`: of what it reads and writes; default: of hidden states.
    """
    width = width or args.hidden_size
    gate = {"gate_proj": (ffn, width)} if is_gated(args) else {}
    return gate | {"up_proj": (ffn, width), "down_proj": (width, ffn)}


def expert_sizes(args) -> Sizes:
    """Sizes of the projections of a routed expert."""
    return mlp_sizes(args, args.moe_ffn_hidden_size or args.ffn_hidden_size, args.moe_latent_size)


def latent_projections(args) -> Sizes:
    """Sizes of the projections to and from experts' latents, by their names; none without."""
    hidden, latent = args.hidden_size, args.moe_latent_size
    return {"fc1_latent_proj": (latent, hidden), "fc2_latent_proj": (hidden, latent)} if latent else {}


def linear_sizes(args, sizes: Sizes) -> Sizes:
    """Rows and columns of the linear layers that hold these projections, by suffix of their names."""
    found = {}
    for suffix, names in linears_of(args).items():
        parts = [sizes[name] for name in names if name in sizes]
        if parts:
            found[suffix] = sum(rows for rows, _ in parts), parts[0][1]
    return found
