"""What a model family is: the tensors of its folders and the meaning of its config.json."""

import re
from collections.abc import Callable
from typing import NamedTuple

from megarl.mcore.weights.hf.mapping import Mapping, heads, rows
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.rotary import rotary_flags

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")

# Megatron's key, without `decoder.layers.N.`, -> tensors of the folder, without `model.layers.N.`
ATTENTION: dict[str, Mapping] = {
    "self_attention.linear_qkv.layer_norm_weight": rows("input_layernorm.weight"),
    "self_attention.linear_qkv.weight": heads(*(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_qkv.bias": heads(*(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "self_attention.linear_proj.weight": rows("self_attn.o_proj.weight"),
    "self_attention.linear_proj.bias": rows("self_attn.o_proj.bias"),
    "self_attention.q_layernorm.weight": rows("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": rows("self_attn.k_norm.weight"),
    "self_attention.core_attention.softmax_offset": rows("self_attn.sinks"),
}
MLP: dict[str, Mapping] = {
    "mlp.linear_fc1.layer_norm_weight": rows("post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": rows("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc1.bias": rows("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "mlp.linear_fc2.weight": rows("mlp.down_proj.weight"),
    "mlp.linear_fc2.bias": rows("mlp.down_proj.bias"),
}
LAYERS = ATTENTION | MLP
# With norms after attention and MLP, after those before them.
SANDWICH: dict[str, Mapping] = {
    **LAYERS,
    "post_self_attn_layernorm.weight": rows("post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": rows("pre_feedforward_layernorm.weight"),
    "post_mlp_layernorm.weight": rows("post_feedforward_layernorm.weight"),
}
# With norms after attention and MLP alone, and norms of queries and keys over all heads.
POST_NORM = {key: value for key, value in SANDWICH.items() if "layer_norm_weight" not in key} | {
    "self_attention.q_norm.weight": rows("self_attn.q_norm.weight"),
    "self_attention.k_norm.weight": rows("self_attn.k_norm.weight"),
}
# Multi-latent attention.
LATENT = MLP | {
    "input_layernorm.weight": rows("input_layernorm.weight"),
    "self_attention.linear_q_proj.weight": rows("self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": rows("self_attn.q_a_proj.weight"),
    "self_attention.q_layernorm.weight": rows("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": rows("self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": rows("self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.kv_layernorm.weight": rows("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": rows("self_attn.kv_b_proj.weight"),
    "self_attention.linear_proj.weight": rows("self_attn.o_proj.weight"),
}
MODEL = {EMBEDDING: rows("model.embed_tokens.weight"), "decoder.final_layernorm.weight": rows("model.norm.weight")}
LM_HEAD, SCALAR_HEAD = rows("lm_head.weight"), rows("score.weight")
FULL, WINDOW = "full_attention", "sliding_attention"  # kinds of layers in config.json


def expert_layers(
    router: str, experts: str, gate: str, up: str, down: str, shared: str = "mlp.shared_experts"
) -> dict[str, Mapping]:
    """The weights of layers with experts.

    Args:
        router, experts, shared: names of the modules.
        gate, up, down: projections of an expert.
    """
    return {
        "mlp.router.weight": rows(f"{router}.weight"),
        "mlp.router.expert_bias": rows(f"{router}.e_score_correction_bias"),
        "mlp.experts.experts.linear_fc1.weight": rows(
            f"{experts}.{{expert}}.{gate}.weight", f"{experts}.{{expert}}.{up}.weight"
        ),
        "mlp.experts.experts.linear_fc2.weight": rows(f"{experts}.{{expert}}.{down}.weight"),
        "mlp.shared_experts.linear_fc1.weight": rows(f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight"),
        "mlp.shared_experts.linear_fc2.weight": rows(f"{shared}.down_proj.weight"),
        "mlp.shared_experts.gate_weight": rows("mlp.shared_expert_gate.weight"),
    }


class Family(NamedTuple):
    """A `model_type` of config.json."""

    model_type: str
    # Layer weights: key without `decoder.layers.N.` -> tensors without `model.layers.N.`
    layers: dict[str, Mapping]
    # ModelConfig -> Megatron's flags without dashes -> value; True for a switch
    flags: Callable[[ModelConfig], dict[str, object]]
    # Another type whose class of transformers reads its config.json.
    config_type: str | None = None


SWIGLU, GEGLU = ("hidden_act", "silu", "swiglu"), ("hidden_activation", "gelu_pytorch_tanh", "geglu")


def model_flags(config: ModelConfig, gate: tuple[str, str, str] = SWIGLU, rotary=rotary_flags) -> dict[str, object]:
    """The flags that all families share: sizes, gated MLP, RMSNorm, rotary embeddings, no biases.

    `gate`: entry with the activation, its value, the flag. `rotary`: function for the flags of rotary embeddings.
    """
    config.require(*gate[:2])
    hidden, attention_heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    return {
        "num-layers": config.whole("num_hidden_layers"),
        "hidden-size": hidden,
        "ffn-hidden-size": config.whole("intermediate_size"),
        "num-attention-heads": attention_heads,
        "group-query-attention": True,
        "num-query-groups": config.whole("num_key_value_heads", "num_attention_heads"),
        "kv-channels": config.get("head_dim") and config.whole("head_dim") or hidden // attention_heads,
        gate[2]: True,
        "normalization": "RMSNorm",
        "norm-epsilon": config.number("rms_norm_eps"),
        "disable-bias-linear": True,
        "max-position-embeddings": config.whole("max_position_embeddings"),
        **rotary(config),
    }


def window_flags(config: ModelConfig) -> dict[str, object]:
    """Which layers have which window; no flags without windows."""
    size = config.get("sliding_window")
    if config.is_known("layer_types"):
        kinds = config.items("layer_types", str, "names")
        if other := set(kinds) - {FULL, WINDOW}:
            raise config.error("layer_types", f"{FULL} or {WINDOW} of each layer, not {min(other)}")
        has_window = [kind == WINDOW for kind in kinds]
    else:
        has_window = [size is not None] * config.whole("num_hidden_layers")
    if not any(has_window):
        return {}
    if config.is_known("layer_types") and not size:  # some classes have 0 for windows that are off
        raise config.error("layer_types", f"no {WINDOW} without a sliding_window that is in use")
    pattern = str([int(x) for x in has_window]).replace(" ", "")
    flags: dict[str, object] = {"window-size": f"{config.whole('sliding_window') - 1},0"}
    return flags | ({} if all(has_window) else {"window-attn-skip-freq": pattern})
