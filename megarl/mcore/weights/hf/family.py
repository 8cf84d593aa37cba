"""What a model family is: the tensors of its folders and the meaning of its config.json."""

import re
from collections.abc import Callable
from typing import NamedTuple

from megarl.mcore.weights.hf.mapping import Mapping, gated_heads, heads, recurrent_parts, rows
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.rotary import rotary_flags

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
PREDICTED, PREDICTED_LAYER = "mtp.layers.0.", "mtp.layers.0.mtp_model_layer."  # keys of multi-token prediction

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
# With norms of queries and keys over all heads.
ALL_HEADS_NORMS: dict[str, Mapping] = {
    "self_attention.q_norm.weight": rows("self_attn.q_norm.weight"),
    "self_attention.k_norm.weight": rows("self_attn.k_norm.weight"),
}
# With norms after attention and MLP alone, and those.
POST_NORM = {key: value for key, value in SANDWICH.items() if "layer_norm_weight" not in key} | ALL_HEADS_NORMS
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
# With attention whose output has gates.
GATED = LAYERS | {"self_attention.linear_qkv.weight": gated_heads(*(f"self_attn.{x}_proj.weight" for x in "qkv"))}
MODEL = {EMBEDDING: rows("model.embed_tokens.weight"), "decoder.final_layernorm.weight": rows("model.norm.weight")}
LM_HEAD, SCALAR_HEAD = rows("lm_head.weight"), rows("score.weight")
FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # kinds of layers in config.json
LINEAR_SIZES = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")


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


# As most families name them.
EXPERT_LAYERS = expert_layers("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj")


def delta_net_layers(projections: dict[str, Mapping]) -> dict[str, Mapping]:
    """The weights of layers with a gated delta net; `projections`: the parts of its first projection."""
    convolution = recurrent_parts("linear_attn.conv1d.weight", "query", "key", "value")
    return {
        "self_attention.in_proj.layer_norm_weight": rows("input_layernorm.weight"),
        **{f"self_attention.in_proj.weight.{part}": mapping for part, mapping in projections.items()},
        **{f"self_attention.conv1d.weight.{part}": mapping for part, mapping in convolution.items()},
        "self_attention.dt_bias": rows("linear_attn.dt_bias"),
        "self_attention.A_log": rows("linear_attn.A_log"),
        "self_attention.out_norm.weight": rows("linear_attn.norm.weight"),
        "self_attention.out_proj.weight": rows("linear_attn.out_proj.weight"),
    }


class Prediction(NamedTuple):
    """Tensors of multi-token prediction (2404.19737).

    Patterns match whole names; `{layer}` in them is the number of a prediction layer, which follow the model's layers.
    """

    pattern: str
    copies: dict[str, str]  # pattern of tensors that are copies -> the model's tensor
    counts: tuple[str, ...]  # entries of config.json with the number of prediction layers; the first that is there
    layer: str = ""  # prefix of the tensors that a layer of the model has, too; "": the policy cannot have this layer
    others: dict[str, str] | None = None  # Megatron's key without `mtp.layers.0.` -> tensor


# Those of DeepSeek-V3 (2412.19437 §2.2) and of the families that follow it.
PREDICTION_LAYERS = Prediction(
    r"model\.layers\.{layer}\..+",
    {
        r"model\.layers\.{layer}\.embed_tokens\.weight": "model.embed_tokens.weight",
        r"model\.layers\.{layer}\.shared_head\.head\.weight": "lm_head.weight",
    },
    ("num_mtp_layers", "num_nextn_predict_layers"),
    "model.layers.{layer}.",
    {name: f"model.layers.{{layer}}.{name}" for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight")}
    | {"final_layernorm.weight": "model.layers.{layer}.shared_head.norm.weight"},
)
# Those of Qwen3-Next and Qwen3.5, which are a module of their own.
PREDICTION_MODULE = Prediction(
    r"mtp\..+", {}, ("mtp_num_hidden_layers",), "mtp.layers.0.",
    {"enorm.weight": "mtp.pre_fc_norm_embedding.weight", "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
     "eh_proj.weight": "mtp.fc.weight", "final_layernorm.weight": "mtp.norm.weight"},
)  # fmt: skip


class Multimodal(NamedTuple):
    """Folders in which the language model is one part among others, such as a vision tower."""

    # Prefix of the language model's tensors, instead of `model.`, and name of its head; the first that a folder has
    names: tuple[tuple[str, str], ...]
    kept: str  # pattern of the other parts' tensors
    is_flat: bool = False  # config.json may have the language model's entries at its top, without `text_config`
    texts: tuple[str, ...] = ()  # `model_type` of further language models, families of their own


# Names of transformers since 4.52, and those before, which it still writes for some classes.
LLAVA = Multimodal(
    (("model.language_model.", "lm_head.weight"), ("language_model.model.", "language_model.lm_head.weight")),
    r"(model\.)?(vision_tower|multi_modal_projector)\..+",
)
QWEN_VL = Multimodal((("model.language_model.", "lm_head.weight"),), r"model\.visual\..+")
# With the names and the config.json of the published folders of Qwen2-VL and Qwen2.5-VL, too.
QWEN2_VL = Multimodal((*QWEN_VL.names, ("model.", "lm_head.weight")), r"(model\.)?visual\..+", is_flat=True)


class OwnNames(NamedTuple):
    """A model's tensors under other names than `model.…`."""

    prefixes: tuple[str, ...]  # instead of `model.`; the first that a folder has
    outer: dict[str, str]  # tensors outside the layers, with `model.` -> their names after the prefix


class Family(NamedTuple):
    """A `model_type` of config.json."""

    model_type: str
    # Layer weights: key without `decoder.layers.N.` -> tensors without `model.layers.N.`
    layers: dict[str, Mapping]
    # ModelConfig -> Megatron's flags without dashes -> value; True for a switch
    flags: Callable[[ModelConfig], dict[str, object]]
    # Another type whose class of transformers reads its config.json.
    config_type: str | None = None
    prediction: Prediction | None = None
    # The language model is described by `text_config`, of the type `config_type`.
    multimodal: Multimodal | None = None
    names: OwnNames | None = None
    experts: str = "mlp.experts"  # module of all experts in transformers
    kept: str | None = None  # pattern of tensors that the policy does not compute with: exports have the folder's
    modules: dict[str, Mapping] | None = None  # `layers` by transformers' modules, where the folder has other names

    @property
    def module_prefixes(self) -> tuple[str, ...]:
        """Prefixes that modules of the language model may have in code; the first is that of transformers."""
        if self.multimodal is not None:
            return tuple(prefix for prefix, _ in self.multimodal.names)
        others = self.names.prefixes if self.names is not None else ()
        return tuple(dict.fromkeys(("model.", *others)))


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
        "ffn-hidden-size": config.whole("intermediate_size", "moe_intermediate_size"),
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


def qkv_biases(config: ModelConfig) -> dict[str, object]:
    """The biases of queries, keys and values alone, if `attention_bias` says so."""
    return {"add-qkv-bias": True} if config.switch("attention_bias") else {}


def delta_net_flags(config: ModelConfig) -> dict[str, object]:
    """Which layers have a gated delta net, its sizes, and gated attention with norms of queries and keys in others."""
    config.require("attention_bias", False, None)
    kinds = config.items("layer_types", str, "names")
    if other := set(kinds) - {FULL, LINEAR}:
        raise config.error("layer_types", f"{FULL} or {LINEAR} of each layer, not {min(other)}")
    found: dict[str, object] = {
        "qk-layernorm": True, "apply-layernorm-1p": True, "attention-output-gate": True,
        "experimental-attention-variant": "gated_delta_net",
        "linear-attention-freq": str([int(kind == LINEAR) for kind in kinds]).replace(" ", ""),
    }  # fmt: skip
    return found | {f"linear-{name.replace('_', '-')}": config.whole(f"linear_{name}") for name in LINEAR_SIZES}


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


def positions_of_windows(config: ModelConfig) -> dict[str, object]:
    """Layers without a window have no positions."""
    is_whole = [int(kind == FULL) for kind in config.items("layer_types", str, "names")]
    return {"no-rope-freq": str(is_whole).replace(" ", "")} if any(is_whole) else {}
