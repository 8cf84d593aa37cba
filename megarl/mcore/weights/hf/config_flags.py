"""The entries of a config.json as Megatron's flags: sizes, activations, windows, rotary embeddings, experts.

A family's flags are the parts of this file that its models have, one after another (`flags_of`). A part refuses values
that megarl's layers do not compute.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

from megarl.mcore.weights.hf.model_config import ModelConfig

FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"  # kinds of layers in config.json
Flags = dict[str, object]  # Megatron's, without dashes -> value; True for a switch


# -- rotary embeddings -----------------------------------------------------------------------------------------------

# Defaults of Megatron's flags for Llama 3's scaling.
LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rotary_flags(config: ModelConfig, rotates_part: bool = False) -> Flags:
    """Base, rotated fraction of the channels, and scaling; UsageError for kinds that the layers do not compute.

    `rotates_part`: the family's models may rotate a part of the channels, though the class has no such default.
    """
    parameters = config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        raise config.error("rope_parameters", "one set for all layers")
    return _flags(config, parameters, rotates_part)


def rotary_flags_by_kind(config: ModelConfig) -> Flags:
    """The same for families whose layers with a window have a rotation of their own, without scaling."""
    sets = config.get("rope_parameters")
    full, window = sets.get("full_attention"), sets.get("sliding_attention")
    if not isinstance(full, dict) or not isinstance(window, dict):
        raise config.error("rope_parameters", "an object for full_attention and one for sliding_attention")
    base = window.get("rope_theta")
    if window.get("rope_type") != "default" or not _is_positive(base):
        raise config.error("rope_parameters", "a rope_theta above 0, and rope_type default, of sliding_attention")
    return _flags(config, full) | {"window-rotary-base": base}


def _flags(config: ModelConfig, parameters: dict, rotates_part: bool = False) -> Flags:
    theta, fraction = parameters.get("rope_theta"), parameters.get("partial_rotary_factor", 1)
    if not _is_positive(theta):
        raise config.error("rope_parameters", "a rope_theta above 0")
    if not _is_positive(fraction) or fraction > 1:
        raise config.error("rope_parameters", "a partial_rotary_factor above 0, at most 1")
    # Transformers rotates all channels in families whose class has no such entry, whatever config.json says.
    if fraction != 1 and not rotates_part and not config.rotates_part():
        raise config.error("rope_parameters", "a partial_rotary_factor of 1 in this family")
    flags = {"position-embedding-type": "rope", "rotary-base": theta}
    return flags | ({} if fraction == 1 else {"rotary-percent": fraction}) | _scaling(config, parameters)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def _scaling(config: ModelConfig, parameters: dict) -> Flags:
    kind, factor = parameters.get("rope_type") or "default", parameters.get("factor")
    key = "rope_parameters"
    if kind == "default":
        return {}
    if kind not in ("linear", "dynamic", "llama3", "longrope", "yarn"):
        raise config.error(key, "rope_type default, linear, dynamic, llama3, longrope or yarn")
    if kind == "longrope":
        return _longrope(config, key, parameters)
    if not _is_positive(factor):
        raise config.error(key, f"a factor above 0 for rope_type {kind}")
    if kind == "dynamic":  # of sequences above the limit alone
        config.check_length(key, config.whole("max_position_embeddings"), " for rope_type dynamic")
        return {}
    if kind == "linear":
        return {"rotary-seq-len-interpolation-factor": factor}
    if kind == "yarn":
        return _yarn(config, key, parameters)
    if wrong := [name for name in LLAMA3_CONSTANTS if not _is_positive(parameters.get(name))]:
        raise config.error(key, f"a number above 0 for {', '.join(wrong)}")
    changed = [name for name, value in LLAMA3_CONSTANTS.items() if parameters[name] != value]
    others = {f"rope-{name.replace('_', '-')}": parameters[name] for name in changed}
    return {"use-rope-scaling": True, "rope-scaling-factor": factor} | others


def _longrope(config: ModelConfig, key: str, parameters: dict) -> Flags:
    """For sequences up to the original length; longer ones have other divisors, from the first token on."""
    divisors, original = parameters.get("short_factor"), parameters.get("original_max_position_embeddings")
    if not isinstance(divisors, list) or not all(map(_is_positive, divisors)):
        raise config.error(key, "a list of numbers above 0 in short_factor")
    config.check_length(key, original, " for rope_type longrope")
    factor, scale = parameters.get("factor"), parameters.get("attention_factor")
    factor = config.whole("max_position_embeddings") / original if factor is None else factor
    if type(original) is not int or original < 2:
        raise config.error(key, "a whole number of 2 or more in original_max_position_embeddings")
    if not _is_positive(factor) or not (scale is None or _is_positive(scale)):
        raise config.error(key, "a factor and an attention_factor above 0, or none")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {"rotary-divisors": ",".join(map(str, divisors)), "rotary-attention-factor": scale}


def _yarn(config: ModelConfig, key: str, parameters: dict) -> Flags:
    """With transformers' defaults, which null means, too."""
    given = {name: value for name, value in parameters.items() if value is not None}
    names = "original_max_position_embeddings beta_fast beta_slow attention_factor mscale mscale_all_dim".split()
    wrong = [name for name in names if name in given and not _is_positive(given[name])]
    if wrong or names[0] not in given:
        raise config.error(key, f"a number above 0 for {', '.join(wrong) or names[0]}")
    factor = given["factor"]
    flags = {
        "position-embedding-type": "yarn",
        "rotary-scaling-factor": factor,
        "yarn-original-max-position-embeddings": given[names[0]],
        "yarn-beta-fast": given.get("beta_fast", 32.0),
        "yarn-beta-slow": given.get("beta_slow", 1.0),
    }
    if "attention_factor" in given and factor > 1:
        flags["mscale"] = (given["attention_factor"] - 1) / (0.1 * math.log(factor))
    elif "mscale" in given and "mscale_all_dim" in given:
        flags |= {"mscale": given["mscale"], "mscale-all-dim": given["mscale_all_dim"]}
    return flags | ({} if given.get("truncate", True) else {"no-yarn-correction-range-round-to-int": True})


# -- what all families share ------------------------------------------------------------------------------------------


def flags_of(*parts: Flags | Callable[[ModelConfig], Flags | None]) -> Callable[[ModelConfig], Flags]:
    """The flags of a family, one part after another: flags, functions of config.json that give some, and checks."""

    def flags(config: ModelConfig) -> Flags:
        found: Flags = {}
        for part in parts:
            found |= (part(config) if callable(part) else part) or {}
        return found

    return flags


def requires(**allowed) -> Callable[[ModelConfig], None]:
    """The check of `ModelConfig.require` as a part of a family's flags."""
    return lambda config: config.require(**allowed)


def switched(key: str, flags: Flags) -> Callable[[ModelConfig], Flags]:
    """Flags of a family whose config.json switches them on."""
    return lambda config: flags if config.switch(key) else {}


Activation = tuple[str, str, Flags]  # entry of config.json, its value, the flags
SWIGLU: Activation = ("hidden_act", "silu", {"swiglu": True})
GEGLU: Activation = ("hidden_activation", "gelu_pytorch_tanh", {"geglu": True})
QK_NORMS: Flags = {"qk-layernorm": True}  # of each head
QKV_BIASES = switched("attention_bias", {"add-qkv-bias": True})  # of queries, keys and values alone


def model_flags(config: ModelConfig, activation: Activation = SWIGLU, rotary=rotary_flags) -> Flags:
    """The flags that all families share: sizes, MLP, RMSNorm, rotary embeddings, no biases. The flags of the activation
    may describe an MLP without a gate; `rotary`: function for the flags of rotary embeddings."""
    config.require(**{activation[0]: activation[1]})
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


# -- experts ----------------------------------------------------------------------------------------------------------

# Gates are sigmoids, normalized over the chosen experts; a bias takes part in the choice alone, and is not trained.
SIGMOID_GATES: Flags = {
    "moe-router-score-function": "sigmoid",
    "moe-router-enable-expert-bias": True,
    "moe-router-bias-update-rate": 0,
}
# Names of one entry in different families and versions; defaults have the second.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def expert_flags(config: ModelConfig, size: str = "moe_intermediate_size") -> Flags:
    """`size`: entry with the size of an expert. Routers compute in fp32; balancing is off unless the user asks."""
    ffn_hidden_size = config.whole(size)
    return {
        "num-experts": config.whole(*EXPERTS),
        "moe-router-topk": config.whole("num_experts_per_tok"),
        "moe-ffn-hidden-size": ffn_hidden_size,
        "moe-router-dtype": "fp32",
        "moe-router-load-balancing-type": "none",
    }


def softmax_gates(config: ModelConfig) -> Flags:
    """Gates are the chosen experts' shares of a softmax over all, normalized to 1 or not.

    Normalized, they equal a softmax over the chosen experts, which is what Megatron computes by default.
    """
    return {} if config.switch("norm_topk_prob") else {"moe-router-pre-softmax": True}


def sigmoid_gates(config: ModelConfig) -> Flags:
    """`SIGMOID_GATES` with a factor and groups of experts."""
    config.require(norm_topk_prob=True)
    check_several(config)
    groups, group_topk = config.whole("n_group"), config.whole("topk_group")
    if groups > 1 and group_topk <= groups and config.whole("num_experts_per_tok") != 2 * group_topk:
        raise config.error("num_experts_per_tok", "2 for each of topk_group groups, whose two best experts are added")
    flags = SIGMOID_GATES | gate_factor("routed_scaling_factor")(config)
    return flags | ({"moe-router-num-groups": groups, "moe-router-group-topk": group_topk} if groups > 1 else {})


def deepseek_gates(config: ModelConfig) -> Flags:
    """`sigmoid_gates` of a config.json that may name them, as DeepSeek's do."""
    config.require(scoring_func=("sigmoid", None), topk_method=("noaux_tc", None))
    return sigmoid_gates(config)


def gate_factor(key: str) -> Callable[[ModelConfig], Flags]:
    """The part of a family's flags with the factor of all gates, an entry."""
    return lambda config: {"moe-router-topk-scaling-factor": config.number(key)}


def check_several(config: ModelConfig):
    """UsageError if normalized gates are those of one expert."""
    if config.whole("num_experts_per_tok") < 2:
        raise config.error("num_experts_per_tok", "2 or more: Megatron does not normalize a single gate")


def sparse_layers(config: ModelConfig) -> Flags:
    """Which layers have experts: every `decoder_sparse_step`-th one that `mlp_only_layers` does not name."""
    layers, step = config.whole("num_hidden_layers"), config.whole("decoder_sparse_step")
    dense = config.items("mlp_only_layers", int, "layers")
    return _layer_flags([i not in dense and (i + 1) % step == 0 for i in range(layers)])


def dense_then_experts(config: ModelConfig) -> Flags:
    """Which layers have experts: those of a list of kinds where the class has one, else all but the first ones."""
    layers = config.whole("num_hidden_layers")
    if config.is_known("mlp_layer_types"):
        kinds = config.items("mlp_layer_types", str, "names")
        if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"} or "sparse" not in kinds:
            raise config.error("mlp_layer_types", "dense or sparse for each layer, sparse for one at least")
        return _layer_flags([kind == "sparse" for kind in kinds])
    dense = config.whole("first_k_dense_replace", "num_dense_layers", minimum=0)
    return _layer_flags([i >= dense for i in range(layers)])


def shared_experts(config: ModelConfig) -> Flags:
    """The size of the experts that every token has."""
    size = config.whole("n_shared_experts", "num_shared_experts") * config.whole("moe_intermediate_size")
    return {"moe-shared-expert-intermediate-size": size}


def gated_shared_expert(config: ModelConfig) -> Flags:
    """The size of the expert that every token has, whose result has a gate."""
    size = config.whole("shared_expert_intermediate_size")
    return {"moe-shared-expert-intermediate-size": size, "moe-shared-expert-gate": True}


def _layer_flags(has_experts: list[bool]) -> Flags:
    """The flag that says which layers have experts; none if all have."""
    return {} if all(has_experts) else {"moe-layer-freq": layer_pattern(has_experts)}
