"""Flags of a role whose model a Hugging Face folder describes."""

from megarl.errors import UsageError
from megarl.mcore.config import megatron_flags, model_flags

# Attributes that change what a model computes, also where a folder's flags leave their defaults.
ARCHITECTURE = frozenset({
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention", "num_query_groups",
    "kv_channels", "swiglu", "squared_relu", "quick_geglu", "normalization", "layernorm_epsilon", "add_bias_linear",
    "add_qkv_bias", "qk_layernorm", "position_embedding_type", "rotary_base", "rotary_percent",
    "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor", "no_rope_freq",
    "untie_embeddings_and_output_weights", "num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk",
    "moe_latent_size",
    "moe_router_pre_softmax", "moe_router_score_function", "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
    "use_rotary_position_embeddings", "layernorm_zero_centered_gamma",
    "activation_func_clamp_value", "glu_linear_offset", "window_size", "window_attn_skip_freq", "softmax_type",
    "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int",
    "rotary_scaling_factor", "mscale", "mscale_all_dim", "multi_latent_attention", "q_lora_rank", "kv_lora_rank",
    "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "experimental_attention_variant", "linear_attention_freq",
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "attention_output_gate", "hybrid_layer_pattern", "mamba_state_dim", "mamba_head_dim",
    "mamba_num_groups", "mamba_num_heads",
}) | model_flags.attributes()  # fmt: skip


def with_folder(role: str, described: list[str], folder: str, tokens: list[str]) -> list[str]:
    """A role's Megatron tokens after those that describe its folder's model.

    Args:
        described: tokens of the folder's config.json.
        folder: flag and path, for messages.

    Raises:
        UsageError: a flag of the user contradicts the folder.
    """
    of_folder, given = megatron_flags.parse_tokens(role, described), megatron_flags.parse_tokens(role, tokens)
    for option in (token.split("=", 1)[0] for token in tokens):
        dest = megatron_flags.destinations().get(option)
        if dest in ARCHITECTURE and getattr(given, dest) != getattr(of_folder, dest):
            raise UsageError(
                f"{role}: {option} {getattr(given, dest)}: config.json of {folder} describes "
                f"{getattr(of_folder, dest)}; leave the flag out"
            )
    return described + tokens


def with_source(error: UsageError, described: list[str], folder: str) -> UsageError:
    """An error about a role's flags that says which of them a folder gave. `described`, `folder`: as above."""
    words = str(error).replace(":", " ").replace(",", " ").split()
    named = [token for token in dict.fromkeys(described) if token.startswith("--") and token in words]
    return UsageError(f"{error} ({', '.join(named)}: from config.json of {folder})") if named else error
