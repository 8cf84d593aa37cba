"""DeepSeek-V2 and V2-Lite (2405.04434): multi-latent attention, gates of a softmax over all experts."""

from megarl.mcore.weights.hf.deepseek import deepseek_flags
from megarl.mcore.weights.hf.experts import softmax_gates
from megarl.mcore.weights.hf.family import EXPERT_LAYERS, LATENT, Family
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the routers' flags; a group's score is its best expert's."""
    config.require("mlp_bias", False, None)
    config.require("norm_topk_prob", False, None)
    config.require("scoring_func", "softmax", None)
    config.require("topk_method", "greedy", "group_limited_greedy")
    found = deepseek_flags(config) | softmax_gates(config)
    found["moe-router-topk-scaling-factor"] = config.number("routed_scaling_factor")
    if config.get("topk_method") == "group_limited_greedy":
        found["moe-router-num-groups"] = config.whole("n_group")
        found["moe-router-group-topk"] = config.whole("topk_group")
        found["moe-router-group-score"] = "max"
    return found


FAMILY = Family(
    model_type="deepseek_v2",
    layers=LATENT | EXPERT_LAYERS,
    flags=flags,
)
