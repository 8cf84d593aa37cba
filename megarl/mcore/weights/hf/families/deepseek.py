"""Families with multi-latent attention: DeepSeek, with dense layers before those with experts, and Mistral 4; in some
layers of Kimi-Linear and Ling 3, beside Kimi delta attention."""

from megarl.mcore.model.weight_table import INDEXER
from megarl.mcore.weights.hf.config_flags import (
    FULL,
    LINEAR,
    Flags,
    deepseek_gates,
    dense_then_experts,
    expert_flags,
    flags_of,
    gate_factor,
    layer_pattern,
    model_flags,
    requires,
    rotary_flags,
    shared_experts,
    softmax_gates,
)
from megarl.mcore.weights.hf.families.dense import check_query_scaling
from megarl.mcore.weights.hf.family import (
    EXPERT_LAYERS,
    LATENT,
    PREDICTION_LAYERS,
    Family,
    Prediction,
    expert_layers,
)
from megarl.mcore.weights.hf.mapping import Mapping, Rows, rows
from megarl.mcore.weights.hf.model_config import ModelConfig

NORM_EPSILON = 1e-6  # of latents, in transformers and in DeepSeek's own code, whatever rms_norm_eps says


def _latent_attention_flags(config: ModelConfig, has_positions: bool = True) -> Flags:
    """Those of a model with multi-latent attention and without experts."""
    config.require(attention_bias=(False, None), num_key_value_heads=(config.whole("num_attention_heads"), None))
    flags = model_flags(config, rotary=_rotary_flags if has_positions else _no_positions)
    for name in ("group-query-attention", "num-query-groups", "kv-channels"):
        del flags[name]
    flags |= {
        "multi-latent-attention": True,
        "qk-layernorm": True,
        "kv-lora-rank": config.whole("kv_lora_rank"),
        "qk-head-dim": config.whole("qk_nope_head_dim"),
        "qk-pos-emb-head-dim": config.whole("qk_rope_head_dim"),
        "v-head-dim": config.whole("v_head_dim"),
    }
    if config.get("q_lora_rank") is not None:
        flags["q-lora-rank"] = config.whole("q_lora_rank")
    if config.number("rms_norm_eps") != NORM_EPSILON:
        flags["latent-norm-epsilon"] = NORM_EPSILON
    return flags


def _no_positions(config: ModelConfig) -> Flags:
    return {"position-embedding-type": "none"}


def _rotary_flags(config: ModelConfig) -> Flags:
    """Those of all families; `mscale_all_dim` scales attention scores, too, as Megatron does it with both factors."""
    flags = rotary_flags(config)
    key, scaling = "rope_parameters", config.get("rope_parameters")
    if scaling["rope_type"] not in ("default", "yarn"):
        raise config.error(key, "rope_type default or yarn in this family")
    if scaling.get("mscale_all_dim") and "mscale-all-dim" not in flags:
        raise config.error(key, "mscale_all_dim beside mscale, without attention_factor")
    return flags


_layer_flags = flags_of(  # all but the routers'
    requires(moe_layer_freq=(1, None)), _latent_attention_flags, expert_flags, shared_experts, dense_then_experts
)


def _group_flags(config: ModelConfig) -> Flags:
    """Groups of experts, if the routers choose some of them; a group's score is its best expert's."""
    if config.get("topk_method") != "group_limited_greedy":
        return {}
    groups, topk = config.whole("n_group"), config.whole("topk_group")
    return {"moe-router-num-groups": groups, "moe-router-group-topk": topk, "moe-router-group-score": "max"}


# DeepSeek-V2 and V2-Lite (2405.04434): gates of a softmax over all experts.
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    layers=LATENT | EXPERT_LAYERS,
    flags=flags_of(
        requires(mlp_bias=(False, None), norm_topk_prob=(False, None), scoring_func=("softmax", None)),
        requires(topk_method=("greedy", "group_limited_greedy")),
        _layer_flags,
        softmax_gates,
        gate_factor("routed_scaling_factor"),
        _group_flags,
    ),
)

# DeepSeek-V3 and R1 (2412.19437), Moonlight: sigmoid gates with a correction bias; a group's score is the sum of its
# two best experts.
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    layers=LATENT | EXPERT_LAYERS,
    flags=flags_of(requires(rope_interleave=True), _layer_flags, deepseek_gates),
    prediction=PREDICTION_LAYERS,
)
# Kimi-K2 (2507.20534)
KIMI_K2 = DEEPSEEK_V3._replace(model_type="kimi_k2", config_type="deepseek_v3")
# GLM-4.7-Flash, with a list of the layers that have experts.
GLM_4_MOE_LITE = DEEPSEEK_V3._replace(model_type="glm4_moe_lite")
# Sarvam 105B
SARVAM_MLA = DEEPSEEK_V3._replace(model_type="sarvam_mla")


def _indexer_flags(config: ModelConfig) -> Flags:
    """Those of layers whose queries choose keys, if they may see more than they choose."""
    types, count = config.items("indexer_types", str, "names"), config.whole("index_topk")
    layers = config.whole("num_hidden_layers")
    if types and (len(types) != layers or set(types) - {"full", "shared"} or types[0] != "full"):
        raise config.error("indexer_types", f"a list of {layers} words, full or shared, the first of them full")
    if config.longest <= count:
        return {}
    flags: Flags = {
        "dsa-indexer-topk": count,
        "dsa-indexer-n-heads": config.whole("index_n_heads"),
        "dsa-indexer-head-dim": config.whole("index_head_dim"),
    }
    if "shared" in types:
        flags["dsa-indexer-layers"] = "[" + ",".join(str(int(each == "full")) for each in types) + "]"
    return flags


def _pairs(config: ModelConfig) -> Flags:
    return {"dsa-indexer-rope-interleaved": True} if _indexer_flags(config) else {}


_INDEXER: dict[str, Mapping] = {
    f"self_attention.{INDEXER}.{ours}": rows(f"self_attn.indexer.{ours.removeprefix('linear_')}")
    for ours in ("linear_wq_b.weight", "linear_wk.weight", "k_norm.weight", "k_norm.bias", "linear_weights_proj.weight")
}
# DeepSeek-V3.2 (2512.02556): queries attend to the tokens that an indexer chooses.
DEEPSEEK_V3_2 = DEEPSEEK_V3._replace(
    model_type="deepseek_v32",
    layers=LATENT | EXPERT_LAYERS | _INDEXER,
    flags=flags_of(_layer_flags, deepseek_gates, _indexer_flags),
    kept=r"model\.layers\.\d+\.self_attn\.indexer\..+",
)
# GLM-5 (2602.15763): some layers share the choice of tokens with the layer before.
# Its indexers rotate pairs of neighbouring channels, those of DeepSeek-V3.2 halves.
GLM_MOE_DSA = DEEPSEEK_V3_2._replace(
    model_type="glm_moe_dsa", flags=flags_of(_layer_flags, deepseek_gates, _indexer_flags, _pairs)
)

# Youtu-LLM: no experts.
YOUTU = Family("youtu", LATENT, flags_of(requires(rope_interleave=True), _latent_attention_flags))


def _mistral_4_flags(config: ModelConfig) -> Flags:
    """Those of DeepSeek's layers with the gates, for sequences in which no query is scaled."""
    found = _layer_flags(config) | softmax_gates(config)
    rotated, others = config.whole("qk_rope_head_dim"), config.whole("qk_nope_head_dim")
    if found.pop("rotary-percent", 1) != rotated / (rotated + others):  # of whole heads, which have both parts
        raise config.error("rope_parameters", "a partial_rotary_factor that is the share of qk_rope_head_dim")
    return found


# Mistral Small 4: softmax gates over the chosen experts.
MISTRAL_4 = Family(
    model_type="mistral4",
    layers=LATENT | EXPERT_LAYERS,
    flags=flags_of(
        requires(rope_interleave=True, n_group=1, routed_scaling_factor=1.0), check_query_scaling, _mistral_4_flags
    ),
)


# -- Kimi delta attention in most layers (2510.26692) ---------------------------------------------------------------


def _delta_flags(config: ModelConfig) -> Flags:
    """Which layers have Kimi delta attention, and its sizes."""
    kinds, layers = config.items("layer_types", str, "names"), config.whole("num_hidden_layers")
    if set(kinds) != {FULL, LINEAR} or len(kinds) != layers:
        raise config.error("layer_types", f"a list of {layers} words, {LINEAR} or {FULL}, both of them")
    heads, channels = config.whole("linear_num_heads"), config.whole("linear_head_dim")
    return {
        "experimental-attention-variant": "gated_delta_net",
        "linear-channel-decay": True,
        "linear-attention-freq": layer_pattern(kind == LINEAR for kind in kinds),
        "linear-conv-kernel-dim": config.whole("linear_conv_kernel_dim"),
        **dict.fromkeys(("linear-num-key-heads", "linear-num-value-heads"), heads),
        **dict.fromkeys(("linear-key-head-dim", "linear-value-head-dim"), channels),
    }


_PARTS = {"query": "q", "key": "k", "value": "v"}
_DELTA: dict[str, Mapping] = {
    **{f"self_attention.in_proj.weight.{part}": rows(f"self_attn.{x}_proj.weight") for part, x in _PARTS.items()},
    **{f"self_attention.conv1d.weight.{part}": rows(f"self_attn.{x}_conv1d.weight") for part, x in _PARTS.items()},
    "self_attention.in_proj.weight.beta": rows("self_attn.b_proj.weight"),
    "self_attention.dt_bias": rows("self_attn.dt_bias"),
    "self_attention.A_log": rows("self_attn.A_log"),
    "self_attention.out_norm.weight": rows("self_attn.o_norm.weight"),
    "self_attention.out_proj.weight": rows("self_attn.o_proj.weight"),
}


def _latent_gates(forget: str) -> dict[str, Mapping]:
    """Output gates and decays from latents; `forget`: prefix of the decays' projections."""
    return {
        "self_attention.latent_proj.weight": rows("self_attn.g_a_proj.weight", f"{forget}.f_a_proj.weight"),
        "self_attention.z_proj.weight": rows("self_attn.g_b_proj.weight"),
        "self_attention.alpha_proj.weight": rows(f"{forget}.f_b_proj.weight"),
    }


def _check_kimi(config: ModelConfig):
    """UsageError for what transformers' class of Kimi-Linear ignores: Kimi-K3's layers have this type, too."""
    config.require(mla_use_nope=(True, None), use_grouped_topk=(True, None), moe_layer_freq=(1, None))
    config.require(moe_router_activation_func=("sigmoid", None), mla_use_output_gate=(False, None))
    config.require(routed_expert_hidden_size=None, attn_res_block_size=None)
    if any((config.get("linear_attn_config") or {}).get(key) for key in ("gate_lower_bound", "use_full_rank_gate")):
        raise config.error("linear_attn_config", "one without gate_lower_bound and use_full_rank_gate")


# Kimi-Linear: decays and output gates from latents; no positions.
KIMI_LINEAR = Family(
    model_type="kimi_linear",
    layers={
        **LATENT,
        **_DELTA,
        "self_attention.A_log": Rows(("self_attn.A_log",), has_unit_axes=True),
        **_latent_gates("self_attn"),
        **expert_layers(
            "block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2"), "block_sparse_moe.shared_experts"
        ),
    },
    flags=flags_of(
        _check_kimi,
        lambda config: _latent_attention_flags(config, has_positions=False),
        _delta_flags,
        lambda config: {"linear-gate-rank": config.whole("linear_head_dim")},
        expert_flags,
        shared_experts,
        dense_then_experts,
        deepseek_gates,
    ),
    modules=LATENT | _DELTA | _latent_gates("self_attn.forget_gate") | EXPERT_LAYERS,
)


def _bound(config: ModelConfig) -> Flags:
    if not config.switch("kda_safe_gate"):
        return {}
    bound = config.get("kda_lower_bound")
    if type(bound) not in (int, float) or not -80 <= bound < 0:
        raise config.error("kda_lower_bound", "a number below 0, -80 or more")
    return {"linear-decay-bound": float(bound)}


def _renamed(layers: dict[str, Mapping], *names: tuple[str, str]) -> dict[str, Mapping]:
    """Weights with other names in their tensors' names."""
    found: dict[str, Mapping] = {}
    for key, mapping in layers.items():
        stored = mapping.names
        for old, new in names:
            stored = tuple(name.replace(old, new) for name in stored)
        found[key] = Rows(stored)
    return found


_LING = {
    **LATENT,
    **_DELTA,
    "self_attention.in_proj.weight.z": rows("self_attn.g_proj.weight"),
    "self_attention.in_proj.weight.alpha": rows("self_attn.forget_gate.f_proj.weight"),
    "self_attention.linear_gate.weight": rows("self_attn.g_proj.weight"),
}
# Ling 3: bounded decays, a gate of each head of multi-latent attention.
BAILING_HYBRID = Family(
    model_type="bailing_hybrid",
    layers={
        **_renamed(_LING, ("forget_gate.", ""), ("self_attn.o_proj", "attention.dense"), ("self_attn.", "attention.")),
        **EXPERT_LAYERS,
        "mlp.router.expert_bias": rows("mlp.gate.expert_bias"),
    },
    flags=flags_of(_layer_flags, _delta_flags, _bound, {"attention-output-gate": True}, deepseek_gates),
    outer={"model.embed_tokens.weight": "word_embeddings.weight"},
    modules=_LING | EXPERT_LAYERS,
    prediction=Prediction(r"model\.layers\.{layer}\..+", {}, ("num_mtp_layers", "num_nextn_predict_layers")),
)
