"""Rotary position embeddings of a config.json as Megatron's flags."""

from megarl.mcore.weights.hf.model_config import ModelConfig

# Megatron fixes these constants of Llama 3's scaling; only the factor is a flag.
LLAMA3_CONSTANTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rotary_flags(config: ModelConfig) -> dict[str, object]:
    """Base, rotated fraction of the channels, and scaling; UsageError for kinds that the layers do not compute.

    A config.json has `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5).
    """
    parameters = _object(config, "rope_parameters") or _old_style(config)
    if any(isinstance(value, dict) for value in parameters.values()):
        raise config.error("rope_parameters", "one set for all layers")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if not _is_positive(theta) or int(theta) != theta:
        key = _source(config) if "rope_theta" in parameters else "rope_theta"
        raise config.error(key, "a rope_theta that is a whole number above 0")
    flags = {"position-embedding-type": "rope", "rotary-base": int(theta)}
    return flags | _fraction(config, parameters) | _scaling(config, parameters)


def _fraction(config: ModelConfig, parameters: dict) -> dict[str, object]:
    """Transformers rotates all channels in families whose class has no such entry, whatever config.json says."""
    key = _source(config) if "partial_rotary_factor" in parameters else "partial_rotary_factor"
    fraction = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if fraction is None or type(fraction) in (int, float) and fraction == 1:
        return {}
    if "partial_rotary_factor" not in config.defaults:
        raise config.error(key, "a partial_rotary_factor of 1 in this family")
    if not _is_positive(fraction) or fraction > 1:
        raise config.error(key, "a partial_rotary_factor above 0, at most 1")
    return {"rotary-percent": fraction}


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def _object(config: ModelConfig, key: str) -> dict:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise config.error(key, "an object")
    return value or {}


def _source(config: ModelConfig) -> str:
    return "rope_parameters" if config.get("rope_parameters") else "rope_scaling"


def _old_style(config: ModelConfig) -> dict:
    scaling = dict(_object(config, "rope_scaling"))
    kind = scaling.pop("type", None)
    return {"rope_type": kind, **scaling} if kind and "rope_type" not in scaling else scaling


def _scaling(config: ModelConfig, parameters: dict) -> dict[str, object]:
    kind, factor = parameters.get("rope_type") or "default", parameters.get("factor")
    key = _source(config)
    if kind == "default":
        return {}
    if kind not in ("linear", "llama3"):
        raise config.error(key, "rope_type default, linear or llama3")
    if not _is_positive(factor):
        raise config.error(key, f"a factor above 0 for rope_type {kind}")
    if kind == "linear":
        if int(factor) != factor:
            raise config.error(key, "a whole factor for rope_type linear")
        return {"rotary-seq-len-interpolation-factor": int(factor)}
    wrong = [name for name, value in LLAMA3_CONSTANTS.items() if parameters.get(name) != value]
    if wrong:
        raise config.error(key, ", ".join(f"{name} {LLAMA3_CONSTANTS[name]}" for name in wrong))
    return {"use-rope-scaling": True, "rope-scaling-factor": factor}
