"""GLM-4-0414 and GLM-Z1: GLM-4's layers, with norms after attention and MLP, too."""

from megarl.mcore.weights.hf.families import glm
from megarl.mcore.weights.hf.mapping import rows
from megarl.mcore.weights.hf.model_config import ModelConfig


def flags(config: ModelConfig) -> dict[str, object]:
    """Adds the norms."""
    return glm.flags(config) | {"layernorm-position": "sandwich"}


FAMILY = glm.FAMILY._replace(
    model_type="glm4",
    layers=glm.FAMILY.layers
    | {
        "post_self_attn_layernorm.weight": rows("post_self_attn_layernorm.weight"),
        "post_mlp_layernorm.weight": rows("post_mlp_layernorm.weight"),
    },
    flags=flags,
)
