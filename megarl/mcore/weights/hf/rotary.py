"""Rotary position embeddings of a config.json as Megatron's flags."""

import math
from typing import Any

from megarl.mcore.weights.hf.model_config import ModelConfig

# Defaults of Megatron's flags for Llama 3's scaling.
LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rotary_flags(config: ModelConfig, rotates_part: bool = False) -> dict[str, object]:
    """Base, rotated fraction of the channels, and scaling; UsageError for kinds that the layers do not compute.

    `rotates_part`: the family's models may rotate a part of the channels, though the class has no such default.
    """
    parameters = config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        raise config.error("rope_parameters", "one set for all layers")
    return _flags(config, parameters, rotates_part)


def rotary_flags_by_kind(config: ModelConfig) -> dict[str, object]:
    """The same for families whose layers with a window have a rotation of their own, without scaling."""
    sets = config.get("rope_parameters")
    full, window = sets.get("full_attention"), sets.get("sliding_attention")
    if not isinstance(full, dict) or not isinstance(window, dict):
        raise config.error("rope_parameters", "an object for full_attention and one for sliding_attention")
    base = window.get("rope_theta")
    if window.get("rope_type") != "default" or not _is_positive(base):
        raise config.error("rope_parameters", "a rope_theta above 0, and rope_type default, of sliding_attention")
    return _flags(config, full) | {"window-rotary-base": base}


def _flags(config: ModelConfig, parameters: dict, rotates_part: bool = False) -> dict[str, object]:
    theta = parameters.get("rope_theta")
    if not _is_positive(theta):
        raise config.error("rope_parameters", "a rope_theta above 0")
    flags = {"position-embedding-type": "rope", "rotary-base": theta}
    return flags | _fraction(config, parameters, rotates_part) | _scaling(config, parameters)


def _fraction(config: ModelConfig, parameters: dict, rotates_part: bool) -> dict[str, object]:
    """Transformers rotates all channels in families whose class has no such entry, whatever config.json says."""
    fraction = parameters.get("partial_rotary_factor", 1)
    if not _is_positive(fraction) or fraction > 1:
        raise config.error("rope_parameters", "a partial_rotary_factor above 0, at most 1")
    if fraction == 1:
        return {}
    if not rotates_part and not config.rotates_part():
        raise config.error("rope_parameters", "a partial_rotary_factor of 1 in this family")
    return {"rotary-percent": fraction}


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def _scaling(config: ModelConfig, parameters: dict) -> dict[str, object]:
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
    wrong = [name for name in LLAMA3_CONSTANTS if not _is_positive(parameters.get(name))]
    if wrong:
        raise config.error(key, f"a number above 0 for {', '.join(wrong)}")
    others = {f"rope-{name.replace('_', '-')}": parameters[name] for name, value in LLAMA3_CONSTANTS.items()
              if parameters[name] != value}  # fmt: skip
    return {"use-rope-scaling": True, "rope-scaling-factor": factor} | others


def _longrope(config: ModelConfig, key: str, parameters: dict) -> dict[str, object]:
    """Flags of LongRoPE for sequences up to the original length; longer ones have other divisors, from the first token
    on."""
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


def _yarn(config: ModelConfig, key: str, parameters: dict) -> dict[str, object]:
    """Flags of YaRN with transformers' defaults; null means the default, too."""
    given = {name: value for name, value in parameters.items() if value is not None}
    names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
             "mscale_all_dim")  # fmt: skip
    wrong = [name for name in names if name in given and not _is_positive(given[name])]
    if wrong or names[0] not in given:
        raise config.error(key, f"a number above 0 for {', '.join(wrong) or names[0]}")
    factor = given["factor"]
    flags = {
        "position-embedding-type": "yarn", "rotary-scaling-factor": factor,
        "yarn-original-max-position-embeddings": given[names[0]],
        "yarn-beta-fast": given.get("beta_fast", 32.0), "yarn-beta-slow": given.get("beta_slow", 1.0),
    }  # fmt: skip
    if "attention_factor" in given and factor > 1:
        flags["mscale"] = (given["attention_factor"] - 1) / (0.1 * math.log(factor))
    elif "mscale" in given and "mscale_all_dim" in given:
        flags |= {"mscale": given["mscale"], "mscale-all-dim": given["mscale_all_dim"]}
    return flags | ({} if given.get("truncate", True) else {"no-yarn-correction-range-round-to-int": True})
