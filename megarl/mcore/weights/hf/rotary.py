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
    theta = parameters.get("rope_theta") or config.number("rope_theta")
    if int(theta) != theta:
        raise config.error("rope_theta", "a whole number")
    flags = {"position-embedding-type": "rope", "rotary-base": int(theta)}
    fraction = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if fraction not in (None, 1, 1.0):
        flags["rotary-percent"] = fraction
    return flags | _scaling(config, parameters)


def _object(config: ModelConfig, key: str) -> dict:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise config.error(key, "an object")
    return value or {}


def _old_style(config: ModelConfig) -> dict:
    scaling = dict(_object(config, "rope_scaling"))
    kind = scaling.pop("type", None)
    return {"rope_type": kind, **scaling} if kind and "rope_type" not in scaling else scaling


def _scaling(config: ModelConfig, parameters: dict) -> dict[str, object]:
    kind, factor = parameters.get("rope_type") or "default", parameters.get("factor")
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    if kind == "default":
        return {}
    if kind not in ("linear", "llama3"):
        raise config.error(key, "rope_type default, linear or llama3")
    if type(factor) not in (int, float) or factor <= 0:
        raise config.error(key, f"a factor above 0 for rope_type {kind}")
    if kind == "linear":
        if int(factor) != factor:
            raise config.error(key, "a whole factor for rope_type linear")
        return {"rotary-seq-len-interpolation-factor": int(factor)}
    wrong = [name for name, value in LLAMA3_CONSTANTS.items() if parameters.get(name) != value]
    if wrong:
        raise config.error(key, ", ".join(f"{name} {LLAMA3_CONSTANTS[name]}" for name in wrong))
    return {"use-rope-scaling": True, "rope-scaling-factor": factor}
