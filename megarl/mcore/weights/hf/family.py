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
ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight": rows("input_layernorm.weight"),
    "self_attention.linear_qkv.weight": heads(*(f"self_attn.{x}_proj.weight" for x in "qkv")),
    "self_attention.linear_qkv.bias": heads(*(f"self_attn.{x}_proj.bias" for x in "qkv")),
    "self_attention.linear_proj.weight": rows("self_attn.o_proj.weight"),
    "self_attention.linear_proj.bias": rows("self_attn.o_proj.bias"),
    "self_attention.q_layernorm.weight": rows("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": rows("self_attn.k_norm.weight"),
}
MLP = {
    "mlp.linear_fc1.layer_norm_weight": rows("post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": rows("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc1.bias": rows("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "mlp.linear_fc2.weight": rows("mlp.down_proj.weight"),
    "mlp.linear_fc2.bias": rows("mlp.down_proj.bias"),
}
LAYERS = ATTENTION | MLP
MODEL = {EMBEDDING: rows("model.embed_tokens.weight"), "decoder.final_layernorm.weight": rows("model.norm.weight")}
LM_HEAD, SCALAR_HEAD = rows("lm_head.weight"), rows("score.weight")


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
    # transformers' class defaults of entries that a config.json may omit.
    defaults: dict[str, object]
    # Layer weights: key without `decoder.layers.N.` -> tensors without `model.layers.N.`
    layers: dict[str, Mapping]
    # ModelConfig -> Megatron's flags without dashes -> value; True for a switch
    flags: Callable[[ModelConfig], dict[str, object]]


def model_flags(config: ModelConfig) -> dict[str, object]:
    """The flags that all families share: sizes, SwiGLU, RMSNorm, rotary embeddings, no biases."""
    config.require("hidden_act", "silu")
    hidden, attention_heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    return {
        "num-layers": config.whole("num_hidden_layers"),
        "hidden-size": hidden,
        "ffn-hidden-size": config.whole("intermediate_size"),
        "num-attention-heads": attention_heads,
        "group-query-attention": True,
        "num-query-groups": config.whole("num_key_value_heads", "num_attention_heads"),
        "kv-channels": config.get("head_dim") and config.whole("head_dim") or hidden // attention_heads,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm-epsilon": config.number("rms_norm_eps"),
        "disable-bias-linear": True,
        "max-position-embeddings": config.whole("max_position_embeddings"),
        **rotary_flags(config),
    }


def check_windows(config: ModelConfig):
    """UsageError if attention is limited to a window that is shorter than a prompt with its response."""
    kinds, window = config.items("layer_types", str, "names"), config.get("sliding_window")
    is_limited = "sliding_attention" in kinds or (config.switch("use_sliding_window") if "use_sliding_window" in
                                                  config.names else window is not None and not kinds)  # fmt: skip
    if is_limited and (type(window) is not int or window < config.longest):
        raise config.error("sliding_window", f"null, or --max-prompt-length + --max-response-length = {config.longest}"
                           " or more: attention windows are not supported yet")  # fmt: skip
