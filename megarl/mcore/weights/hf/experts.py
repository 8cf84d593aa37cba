"""Experts and routers of a config.json as Megatron's flags."""

from collections.abc import Callable

from megarl.mcore.weights.hf.family import layer_pattern
from megarl.mcore.weights.hf.model_config import ModelConfig

# Gates are sigmoids, normalized over the chosen experts; a bias takes part in the choice alone, and is not trained.
SIGMOID_GATES: dict[str, object] = {
    "moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True, "moe-router-bias-update-rate": 0,
}  # fmt: skip
# Names of one entry in different families and versions; defaults have the second.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def expert_flags(config: ModelConfig, size: str = "moe_intermediate_size") -> dict[str, object]:
    """Number of the experts, and their size, an entry. Routers compute in fp32, and balancing is off unless the user
    asks for it."""
    ffn_hidden_size = config.whole(size)
    return {
        "num-experts": config.whole(*EXPERTS),
        "moe-router-topk": config.whole("num_experts_per_tok"),
        "moe-ffn-hidden-size": ffn_hidden_size,
        "moe-router-dtype": "fp32",
        "moe-router-load-balancing-type": "none",
    }


def softmax_gates(config: ModelConfig) -> dict[str, object]:
    """Gates are the chosen experts' shares of a softmax over all, normalized to 1 or not.

    Normalized, they equal a softmax over the chosen experts, which is what Megatron computes by default.
    """
    return {} if config.switch("norm_topk_prob") else {"moe-router-pre-softmax": True}


def sigmoid_gates(config: ModelConfig) -> dict[str, object]:
    """`SIGMOID_GATES` with a factor and groups of experts."""
    config.require("norm_topk_prob", True)
    check_several(config)
    groups, group_topk = config.whole("n_group"), config.whole("topk_group")
    if groups > 1 and group_topk <= groups and config.whole("num_experts_per_tok") != 2 * group_topk:
        raise config.error("num_experts_per_tok", "2 for each of topk_group groups, whose two best experts are added")
    flags = SIGMOID_GATES | gate_factor("routed_scaling_factor")(config)
    return flags | ({"moe-router-num-groups": groups, "moe-router-group-topk": group_topk} if groups > 1 else {})


def deepseek_gates(config: ModelConfig) -> dict[str, object]:
    """`sigmoid_gates` of a config.json that may name them, as DeepSeek's do."""
    config.require("scoring_func", "sigmoid", None)
    config.require("topk_method", "noaux_tc", None)
    return sigmoid_gates(config)


def gate_factor(key: str) -> Callable[[ModelConfig], dict[str, object]]:
    """The part of a family's flags with the factor of all gates, an entry."""
    return lambda config: {"moe-router-topk-scaling-factor": config.number(key)}


def check_several(config: ModelConfig):
    """UsageError if normalized gates are those of one expert."""
    if config.whole("num_experts_per_tok") < 2:
        raise config.error("num_experts_per_tok", "2 or more: Megatron does not normalize a single gate")


def sparse_layers(config: ModelConfig) -> dict[str, object]:
    """Which layers have experts: every `decoder_sparse_step`-th one that `mlp_only_layers` does not name."""
    layers, step = config.whole("num_hidden_layers"), config.whole("decoder_sparse_step")
    dense = config.items("mlp_only_layers", int, "layers")
    return _layer_flags([i not in dense and (i + 1) % step == 0 for i in range(layers)])


def dense_then_experts(config: ModelConfig) -> dict[str, object]:
    """Which layers have experts: those of a list of kinds where the class has one, else all but the first ones."""
    layers = config.whole("num_hidden_layers")
    if config.is_known("mlp_layer_types"):
        kinds = config.items("mlp_layer_types", str, "names")
        if len(kinds) != layers or not set(kinds) <= {"dense", "sparse"} or "sparse" not in kinds:
            raise config.error("mlp_layer_types", "dense or sparse for each layer, sparse for one at least")
        return _layer_flags([kind == "sparse" for kind in kinds])
    dense = config.whole("first_k_dense_replace", "num_dense_layers", minimum=0)
    return _layer_flags([i >= dense for i in range(layers)])


def shared_experts(config: ModelConfig) -> dict[str, object]:
    """The size of the experts that every token has."""
    size = config.whole("n_shared_experts", "num_shared_experts") * config.whole("moe_intermediate_size")
    return {"moe-shared-expert-intermediate-size": size}


def gated_shared_expert(config: ModelConfig) -> dict[str, object]:
    """The size of the expert that every token has, whose result has a gate."""
    size = config.whole("shared_expert_intermediate_size")
    return {"moe-shared-expert-intermediate-size": size, "moe-shared-expert-gate": True}


def _layer_flags(has_experts: list[bool]) -> dict[str, object]:
    """The flag that says which layers have experts; none if all have."""
    return {} if all(has_experts) else {"moe-layer-freq": layer_pattern(has_experts)}
