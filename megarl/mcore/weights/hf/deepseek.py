"""What the DeepSeek families share: multi-latent attention, dense layers before those with experts, shared experts."""

from megarl.mcore.weights.hf.experts import dense_then_experts, expert_flags, shared_experts
from megarl.mcore.weights.hf.family import model_flags
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.rotary import rotary_flags

NORM_EPSILON = 1e-6  # of latents, in transformers and in DeepSeek's own code, whatever rms_norm_eps says


def deepseek_flags(config: ModelConfig) -> dict[str, object]:
    """All but the routers' flags."""
    config.require("moe_layer_freq", 1, None)
    found = latent_attention_flags(config) | expert_flags(config, config.whole("moe_intermediate_size"))
    return found | shared_experts(config) | dense_then_experts(config)


def latent_attention_flags(config: ModelConfig) -> dict[str, object]:
    """Those of a model with multi-latent attention and without experts."""
    config.require("attention_bias", False, None)
    config.require("num_key_value_heads", config.whole("num_attention_heads"), None)
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


def check_chosen_tokens(config: ModelConfig):
    """UsageError if a query may have more tokens before it than its indexer chooses. Of a shorter sequence it chooses
    all."""
    why = ": later queries attend to so many tokens that an indexer chooses, which is not implemented"
    config.check_length("index_topk", config.whole("index_topk"), why)


def _rotary_flags(config: ModelConfig) -> dict[str, object]:
    """Those of all families; `mscale_all_dim` scales attention scores, too, as Megatron does it with both factors."""
    flags = rotary_flags(config)
    key, scaling = "rope_parameters", config.get("rope_parameters")
    if scaling["rope_type"] not in ("default", "yarn"):
        raise config.error(key, "rope_type default or yarn in this family")
    if scaling.get("mscale_all_dim") and "mscale-all-dim" not in flags:
        raise config.error(key, "mscale_all_dim beside mscale, without attention_factor")
    return flags
