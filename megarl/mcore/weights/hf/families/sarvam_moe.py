"""Sarvam 30B: GLM-4.5's layers, with a rotation of all channels, under names of their own."""

from megarl.mcore.weights.hf.families import glm4_moe
from megarl.mcore.weights.hf.family import EXPERT_LAYERS, LAYERS, OwnNames
from megarl.mcore.weights.hf.mapping import fused_heads, rows

FAMILY = glm4_moe.FAMILY._replace(
    model_type="sarvam_moe",
    layers=LAYERS
    | EXPERT_LAYERS
    | {
        "self_attention.linear_qkv.weight": fused_heads("attention.query_key_value.weight"),
        "self_attention.linear_qkv.bias": fused_heads("attention.query_key_value.bias"),
        "self_attention.linear_proj.weight": rows("attention.dense.weight"),
        "self_attention.q_layernorm.weight": rows("attention.query_layernorm.weight"),
        "self_attention.k_layernorm.weight": rows("attention.key_layernorm.weight"),
        "mlp.router.expert_bias": rows("mlp.gate.expert_bias"),
    },
    modules=LAYERS | EXPERT_LAYERS,
    prediction=None,
    names=OwnNames(("model.",), {"model.embed_tokens.weight": "word_embeddings.weight"}),
)
