"""Nemotron-H (2504.03624), Nemotron 3: layers of Mamba-2, attention without positions, an MLP, or experts alone."""

from megarl.mcore.weights.hf.config_flags import expert_flags, sigmoid_gates
from megarl.mcore.weights.hf.family import Family, Prediction
from megarl.mcore.weights.hf.mapping import Heads, recurrent_parts, rows
from megarl.mcore.weights.hf.model_config import ModelConfig

LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}


def flags(config: ModelConfig) -> dict[str, object]:
    """Kinds of the layers, sizes of Mamba-2 and attention, MLPs of squared ReLU, and experts."""
    config.require(mlp_hidden_act="relu2", mamba_hidden_act="silu", use_conv_bias=True, residual_in_fp32=False)
    config.require(**dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"), (False, None)))
    config.require(sliding_window=None)
    kinds = config.items("layers_block_type", str, "names")
    if other := set(kinds) - LETTERS.keys():
        raise config.error("layers_block_type", f"{', '.join(LETTERS)} of each layer, not {min(other)}")
    if "linear_attention" not in kinds:
        raise config.error("layers_block_type", "linear_attention of one layer or more")
    found: dict[str, object] = {
        "num-layers": len(kinds),
        "hybrid-layer-pattern": "".join(LETTERS[kind] for kind in kinds),
        "hidden-size": config.whole("hidden_size"),
        "ffn-hidden-size": config.whole("intermediate_size"),
        "num-attention-heads": config.whole("num_attention_heads"),
        "group-query-attention": True,
        "num-query-groups": config.whole("num_key_value_heads"),
        "kv-channels": config.whole("head_dim"),
        "squared-relu": True,
        "normalization": "RMSNorm",
        "norm-epsilon": config.number("layer_norm_epsilon"),
        "disable-bias-linear": True,
        "max-position-embeddings": config.whole("max_position_embeddings"),
        "position-embedding-type": "none",
        "mamba-state-dim": config.whole("ssm_state_size"),
        "mamba-head-dim": config.whole("mamba_head_dim"),
        "mamba-num-heads": config.whole("mamba_num_heads"),
        "mamba-num-groups": config.whole("n_groups"),
        "mamba-dt-min": config.number("time_step_min"),
        "linear-conv-kernel-dim": config.whole("conv_kernel"),
    }
    return found | (_experts(config) if "moe" in kinds else {})


def _experts(config: ModelConfig) -> dict[str, object]:
    """Sigmoid gates with a correction bias, a shared expert, and latents of the others."""
    found = expert_flags(config) | sigmoid_gates(config)
    if config.get("moe_latent_size") is not None:
        found["moe-latent-size"] = config.whole("moe_latent_size")
    config.require(n_shared_experts=1)
    found["moe-shared-expert-intermediate-size"] = config.whole("moe_shared_expert_intermediate_size")
    return found


NORM = rows("norm.weight")
_IN, _CONVOLUTION = "mixer.in_proj.weight", ("x", "B", "C")
NEMOTRON_H = Family(
    model_type="nemotron_h",
    layers={
        "self_attention.in_proj.layer_norm_weight": NORM,
        "self_attention.linear_qkv.layer_norm_weight": NORM,
        "mlp.linear_fc1.layer_norm_weight": NORM,
        **{f"self_attention.in_proj.weight.{part}": mapping
           for part, mapping in recurrent_parts(_IN, "z", "x", "B", "C", "dt").items()},
        **{f"self_attention.conv1d.{kind}.{part}": mapping for kind in ("weight", "bias")
           for part, mapping in recurrent_parts(f"mixer.conv1d.{kind}", *_CONVOLUTION).items()},
        **{f"self_attention.{name}": rows(f"mixer.{name}")
           for name in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")},
        "self_attention.linear_qkv.weight": Heads(tuple(f"mixer.{x}_proj.weight" for x in "qkv")),
        "self_attention.linear_proj.weight": rows("mixer.o_proj.weight"),
        "mlp.linear_fc1.weight": rows("mixer.up_proj.weight"),
        "mlp.linear_fc2.weight": rows("mixer.down_proj.weight"),
        "mlp.router.weight": rows("mixer.gate.weight"),
        "mlp.router.expert_bias": rows("mixer.gate.e_score_correction_bias"),
        **{f"mlp.{name}.weight": rows(f"mixer.{name}.weight") for name in ("fc1_latent_proj", "fc2_latent_proj")},
        "mlp.experts.experts.linear_fc1.weight": rows("mixer.experts.{expert}.up_proj.weight"),
        "mlp.experts.experts.linear_fc2.weight": rows("mixer.experts.{expert}.down_proj.weight"),
        "mlp.shared_experts.linear_fc1.weight": rows("mixer.shared_experts.up_proj.weight"),
        "mlp.shared_experts.linear_fc2.weight": rows("mixer.shared_experts.down_proj.weight"),
    },
    flags=flags,
    prediction=Prediction(r"mtp\..+", {}, ("num_nextn_predict_layers",)),
    prefixes=("backbone.", "model."),
    outer={"model.embed_tokens.weight": "embeddings.weight", "model.norm.weight": "norm_f.weight"},
    experts="mixer.experts",
)  # fmt: skip
