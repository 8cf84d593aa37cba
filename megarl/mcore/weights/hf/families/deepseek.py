"""Families with multi-latent attention: DeepSeek, with dense layers before those with experts, and Mistral 4."""

from megarl.mcore.weights.hf.config_flags import (
    Flags,
    deepseek_gates,
    dense_then_experts,
    expert_flags,
    flags_of,
    gate_factor,
    model_flags,
    requires,
    rotary_flags,
    shared_experts,
    softmax_gates,
)
from megarl.mcore.weights.hf.families.llama import check_query_scaling
from megarl.mcore.weights.hf.family import EXPERT_LAYERS, LATENT, PREDICTION_LAYERS, Family
from megarl.mcore.weights.hf.model_config import ModelConfig

NORM_EPSILON = 1e-6  # of latents, in transformers and in DeepSeek's own code, whatever rms_norm_eps says


def _latent_attention_flags(config: ModelConfig) -> Flags:
    """Those of a model with multi-latent attention and without experts."""
    config.require(attention_bias=(False, None), num_key_value_heads=(config.whole("num_attention_heads"), None))
    flags = model_flags(config, rotary=_rotary_flags)
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


def _check_chosen_tokens(config: ModelConfig):
    """UsageError if a query may have more tokens before it than its indexer chooses. Of a shorter sequence it chooses
    all."""
    why = ": later queries attend to so many tokens that an indexer chooses, which is not implemented"
    config.check_length("index_topk", config.whole("index_topk"), why)


# DeepSeek-V3.2 (2512.02556): queries attend to the tokens that an indexer chooses.
DEEPSEEK_V3_2 = DEEPSEEK_V3._replace(
    model_type="deepseek_v32",
    flags=flags_of(_check_chosen_tokens, _layer_flags, deepseek_gates),
    kept=r"model\.layers\.\d+\.self_attn\.indexer\..+",
)
# GLM-5 (2602.15763): some layers share the choice of tokens with the layer before.
GLM_MOE_DSA = DEEPSEEK_V3_2._replace(model_type="glm_moe_dsa")

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
