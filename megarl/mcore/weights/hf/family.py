"""What a model family is: the tensors of its folders and the meaning of its config.json."""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from megarl.mcore.weights.hf.mapping import Heads, Mapping, rows
from megarl.mcore.weights.hf.model_config import ModelConfig
from megarl.mcore.weights.hf.rotary import rotary_flags

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
PREDICTED, PREDICTED_LAYER = "mtp.layers.0.", "mtp.layers.0.mtp_model_layer."  # keys of multi-token prediction

QKV_NAMES = tuple(f"self_attn.{x}_proj.weight" for x in "qkv")
# Megatron's key, without `decoder.layers.N.`, -> tensors of the folder, without `model.layers.N.`
ATTENTION: dict[str, Mapping] = {
    "self_attention.linear_qkv.layer_norm_weight": rows("input_layernorm.weight"),
    "self_attention.linear_qkv.weight": Heads(QKV_NAMES),
    "self_attention.linear_qkv.bias": Heads(tuple(f"self_attn.{x}_proj.bias" for x in "qkv")),
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
# With norms after attention and MLP alone.
POST_NORM = {key: value for key, value in SANDWICH.items() if "layer_norm_weight" not in key}
# With norms of queries and keys over all heads.
ALL_HEADS_NORMS: dict[str, Mapping] = {
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
FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # kinds of layers in config.json


def expert_layers(
    router: str = "mlp.gate", experts: str = "mlp.experts", gate: str = "gate_proj", up: str = "up_proj",
    down: str = "down_proj", shared: str = "mlp.shared_experts",
) -> dict[str, Mapping]:  # fmt: skip
    """The weights of layers with experts; the defaults are the names of most families.

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


EXPERT_LAYERS = expert_layers()


NO_TENSORS: dict[str, str] = {}


class Prediction(NamedTuple):
    """Tensors of multi-token prediction (2404.19737).

    Patterns match whole names; `{layer}` in them is the number of a prediction layer, which follow the model's layers.
    """

    pattern: str
    copies: dict[str, str]  # pattern of tensors that are copies -> the model's tensor
    counts: tuple[str, ...]  # entries of config.json with the number of prediction layers; the first that is there
    layer: str = ""  # prefix of the tensors that a layer of the model has, too; "": the policy cannot have this layer
    others: dict[str, str] = NO_TENSORS  # Megatron's key without `mtp.layers.0.` -> tensor


NO_PREDICTION = Prediction("", {}, ())
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


class TensorNames(NamedTuple):
    """Names of the tensors in folders of a language model alone."""

    prefixes: tuple[str, ...] = ("model.",)  # the first that a folder has
    # Tensors outside the layers with other names, with `model.` -> their names after the prefix
    outer: dict[str, str] = NO_TENSORS


Flags = dict[str, object]  # Megatron's, without dashes -> value; True for a switch


class Family(NamedTuple):
    """A `model_type` of config.json."""

    model_type: str
    # Layer weights: key without `decoder.layers.N.` -> tensors without `model.layers.N.`
    layers: dict[str, Mapping]
    flags: Callable[[ModelConfig], Flags]
    # Another type whose class of transformers reads its config.json.
    config_type: str | None = None
    prediction: Prediction = NO_PREDICTION
    # The language model is described by `text_config`, of the type `config_type`.
    multimodal: Multimodal | None = None
    names: TensorNames = TensorNames()
    experts: str = "mlp.experts"  # module of all experts in transformers
    kept: str | None = None  # pattern of tensors that the policy does not compute with: exports have the folder's
    modules: dict[str, Mapping] | None = None  # `layers` by transformers' modules, where the folder has other names

    @property
    def module_prefixes(self) -> tuple[str, ...]:
        """Prefixes that modules of the language model may have in code; the first is that of transformers."""
        if self.multimodal is not None:
            return tuple(prefix for prefix, _ in self.multimodal.names)
        return tuple(dict.fromkeys(("model.", *self.names.prefixes)))


def flags_of(*parts: Flags | Callable[[ModelConfig], Flags | None]) -> Callable[[ModelConfig], Flags]:
    """The flags of a family, one part after another: flags, functions of config.json that give some, and checks."""

    def flags(config: ModelConfig) -> Flags:
        found: Flags = {}
        for part in parts:
            found |= (part(config) if callable(part) else part) or {}
        return found

    return flags


def requires(key: str, *allowed) -> Callable[[ModelConfig], None]:
    """The check that an entry has one of these values, the only ones that megarl's layers compute."""
    return lambda config: config.require(key, *allowed)


def switched(key: str, flags: Flags) -> Callable[[ModelConfig], Flags]:
    """Flags of a family whose config.json switches them on."""
    return lambda config: flags if config.switch(key) else {}


Activation = tuple[str, str, Flags]  # entry of config.json, its value, the flags
SWIGLU: Activation = ("hidden_act", "silu", {"swiglu": True})
GEGLU: Activation = ("hidden_activation", "gelu_pytorch_tanh", {"geglu": True})
QK_NORMS: Flags = {"qk-layernorm": True}  # of each head
QKV_BIASES = switched("attention_bias", {"add-qkv-bias": True})  # of queries, keys and values alone


def model_flags(config: ModelConfig, activation: Activation = SWIGLU, rotary=rotary_flags) -> Flags:
    """The flags that all families share: sizes, MLP, RMSNorm, rotary embeddings, no biases.

    Args:
        activation: of MLPs; its flags may describe one without a gate.
        rotary: function for the flags of rotary embeddings.
    """
    config.require(*activation[:2])
    hidden, attention_heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    return {
        "num-layers": config.whole("num_hidden_layers"),
        "hidden-size": hidden,
        "ffn-hidden-size": config.whole("intermediate_size", "moe_intermediate_size"),
        "num-attention-heads": attention_heads,
        "group-query-attention": True,
        "num-query-groups": config.whole("num_key_value_heads", "num_attention_heads"),
        "kv-channels": config.get("head_dim") and config.whole("head_dim") or hidden // attention_heads,
        **activation[2],
        "normalization": "RMSNorm",
        "norm-epsilon": config.number("rms_norm_eps"),
        "disable-bias-linear": True,
        "max-position-embeddings": config.whole("max_position_embeddings"),
        **rotary(config),
    }


def layer_pattern(has: Iterable[bool]) -> str:
    """A flag's value with a zero or a one for each layer."""
    return f"[{','.join(str(int(each)) for each in has)}]"


def window_flags(config: ModelConfig) -> Flags:
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
    flags: Flags = {"window-size": f"{config.whole('sliding_window') - 1},0"}
    return flags | ({} if all(has_window) else {"window-attn-skip-freq": layer_pattern(has_window)})


def positions_of_windows(config: ModelConfig) -> Flags:
    """Layers without a window have no positions."""
    is_whole = [kind == FULL for kind in config.items("layer_types", str, "names")]
    return {"no-rope-freq": layer_pattern(is_whole)} if any(is_whole) else {}
