"""Rules on flags that describe a model's layers: values that the layers compute, and flags that would have no effect.

A rule is data, as in `layout_rules`.
"""

import math

from megarl.mcore.config.layout_rules import LayoutRule, is_pattern, min_value, value_of
from megarl.mcore.config.model_flags import ROTARY, divisors_of, is_gated

# Megatron's; others are None.
DEFAULTS = {"rotary-scaling-factor": 1.0, "mscale": 1.0, "mscale-all-dim": 0.0, "kv-lora-rank": 32, "qk-head-dim": 128,
            "qk-pos-emb-head-dim": 64, "v-head-dim": 128, "rope-scaling-factor": 8.0,
            "num-query-groups": 1, "rotary-base": 10000, "rotary-percent": 1.0}  # fmt: skip
LATENT = "--multi-latent-attention"
LATENT_SIZES = ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
# Flags of other kinds of attention, and their defaults.
NOT_LATENT = {
    "group-query-attention": False, "add-qkv-bias": False, "qk-layernorm-all-heads": False, "window-size": None,
    "no-rope-freq": None, "query-pre-attn-scalar": None, "rotary-percent": 1.0, "attn-logit-softcapping": None,
    "softmax-type": "vanilla",
}  # fmt: skip


def rules(args) -> list[LayoutRule]:
    """Returns all rules for a role's parsed namespace, before Megatron's own validation; their number is constant."""
    return _windows(args) + _layers(args) + _experts(args) + _rotary(args) + _latent_attention(args)


def _windows(args) -> list[LayoutRule]:
    size, freq, layers = args.window_size, args.window_attn_skip_freq, args.num_layers
    fits = freq is None or (freq > 1 if isinstance(freq, int) else is_pattern(freq, layers) and 1 in freq)
    return [
        LayoutRule("--window-size", size, size is None or len(size) == 2 and size[0] >= 0 and size[1] == 0,
             "N,0 with N of 0 or more: a token sees itself and the N tokens before it"),
        LayoutRule("--window-attn-skip-freq", freq, freq is None or size is not None, "none without --window-size"),
        LayoutRule("--window-attn-skip-freq", freq, fits,
             f"a number above 1, or a pattern of {layers} zeros (full attention) and ones, with a one"),
    ]  # fmt: skip


def _layers(args) -> list[LayoutRule]:
    all_heads, kind, modules = args.qk_layernorm_all_heads, args.normalization, args.recompute_modules or []
    others = [name for name in ("swiglu", "squared-relu", "quick-geglu") if getattr(args, name.replace("-", "_"))]
    return [
        _only_with(args, "num-query-groups", args.group_query_attention, "--group-query-attention"),
        *(_positive(args, name) for name in ("embedding-multiplier", "attn-logit-softcapping",
                                             "final-logit-softcapping", "query-pre-attn-scalar")),
        LayoutRule("--qk-layernorm-all-heads", all_heads, not all_heads or not args.qk_layernorm,
             "none with --qk-layernorm, which norms each head"),
        LayoutRule("--qk-layernorm-all-heads", all_heads, not all_heads or kind == "RMSNorm",
             f"none with --normalization {kind}: it is an RMSNorm"),
        LayoutRule("--qk-layernorm-all-heads", all_heads, not all_heads or not args.layernorm_zero_centered_gamma,
             "none with --apply-layernorm-1p"),
        LayoutRule("--recompute-modules", " ".join(modules), "layernorm" not in modules,
             "none with layernorm: norms are recomputed with the rest of their layer"),
        LayoutRule("--recompute-modules", " ".join(modules),
             not modules or args.recompute_activations or args.recompute_granularity is not None,
             "none without --recompute-granularity"),
        LayoutRule("--geglu", args.geglu, not args.geglu or not others, f"none with --{' --'.join(others)}"),
    ]  # fmt: skip


def _experts(args) -> list[LayoutRule]:
    has_biases, ranks = args.num_experts and args.add_bias_linear, args.expert_tensor_parallel_size
    shared, offset, clamp = (
        args.moe_shared_expert_intermediate_size, args.glu_linear_offset, args.activation_func_clamp_value
    )  # fmt: skip
    return [
        LayoutRule("--expert-tensor-parallel-size", ranks, not has_biases or ranks == 1,
             "1 without --disable-bias-linear: each rank would add an expert's bias"),
        LayoutRule("--moe-shared-expert-intermediate-size", shared, not has_biases or shared is None,
             "none without --disable-bias-linear: shared experts have no biases"),
        LayoutRule("--glu-linear-offset", offset, offset == 0 or is_gated(args),
             "0 without a gated MLP, as of --quick-geglu"),
        LayoutRule("--activation-func-clamp-value", clamp, clamp is None or is_gated(args) and clamp > 0,
             "above 0, with a gated MLP, as of --quick-geglu"),
        LayoutRule("--moe-router-group-score", args.moe_router_group_score,
             args.moe_router_group_score == "sum" or bool(args.moe_router_num_groups),
             "sum without --moe-router-num-groups"),
    ]  # fmt: skip


def _rotary(args) -> list[LayoutRule]:
    kind, base, window_base = args.position_embedding_type, args.rotary_base, args.window_rotary_base
    linear, factor = args.rotary_seq_len_interpolation_factor, args.rotary_scaling_factor
    llama3 = ("rope-low-freq-factor", "rope-high-freq-factor", "rope-original-max-position-embeddings")
    rotary = ("rotary-base", "rotary-percent", "rotary-seq-len-interpolation-factor", "no-rope-freq")
    yarn = ("yarn-original-max-position-embeddings", "yarn-beta-fast", "yarn-beta-slow",
            "yarn-correction-range-round-to-int", "rotary-scaling-factor", "mscale", "mscale-all-dim")  # fmt: skip
    divisors, scale = args.rotary_divisors, args.rotary_attention_factor
    channels = args.kv_channels or args.hidden_size // max(args.num_attention_heads, 1)
    pairs = int(channels * args.rotary_percent) // 2
    is_plain = kind == "rope" and not args.use_rope_scaling and linear is None and window_base is None
    low, high = _or(args.rope_low_freq_factor, 1.0), _or(args.rope_high_freq_factor, 4.0)
    fast, slow = _or(args.yarn_beta_fast, 32.0), _or(args.yarn_beta_slow, 1.0)
    return [
        LayoutRule("--rotary-base", base, base > 1, "above 1"),
        LayoutRule("--rotary-percent", args.rotary_percent, 0 < args.rotary_percent <= 1, "above 0, at most 1"),
        LayoutRule("--window-rotary-base", window_base, window_base is None or window_base > 1, "above 1"),
        LayoutRule("--window-rotary-base", window_base,
             window_base is None or args.window_size is not None and kind in ROTARY,
             "none without --window-size and rotary embeddings"),
        LayoutRule("--rotary-seq-len-interpolation-factor", linear, linear is None or linear >= 1, "1 or more"),
        LayoutRule("--rope-scaling-factor", args.rope_scaling_factor, args.rope_scaling_factor >= 1, "1 or more"),
        *(_only_with(args, name, args.use_rope_scaling, "--use-rope-scaling") for name in llama3),
        _only_with(args, "rope-scaling-factor", args.use_rope_scaling, "--use-rope-scaling"),
        LayoutRule("--rope-high-freq-factor", high, 0 < low < high,
             f"above --rope-low-freq-factor {low}, which is above 0"),
        min_value("--rope-original-max-position-embeddings", args.rope_original_max_position_embeddings),
        *(_only_with(args, name, kind == "yarn", "--position-embedding-type yarn") for name in yarn),
        *(LayoutRule(f"--{name}", value_of(args, name), kind in ROTARY or value_of(args, name) == DEFAULTS.get(name),
               f"none with --position-embedding-type {kind}: it is for rotary embeddings") for name in rotary),
        LayoutRule("--rotary-divisors", divisors, divisors is None or len(divisors_of(divisors)) == pairs,
             f"{pairs} numbers above 0, one for each pair of rotated channels"),
        *(LayoutRule(flag, value, value is None or is_plain and not args.multi_latent_attention,
             "none with another scaling, --window-rotary-base or --multi-latent-attention")
          for flag, value in (("--rotary-divisors", divisors), ("--rotary-attention-factor", scale))),
        LayoutRule("--rotary-attention-factor", scale, scale is None or scale > 0, "above 0"),
        LayoutRule("--rotary-scaling-factor", factor, factor >= 1, "1 or more"),
        LayoutRule("--yarn-beta-fast", fast, fast > slow > 0, f"above --yarn-beta-slow {slow}, which is above 0"),
        min_value("--yarn-original-max-position-embeddings", args.yarn_original_max_position_embeddings),
        LayoutRule("--use-rope-scaling", True, not args.use_rope_scaling or kind == "rope",
             f"none with --position-embedding-type {kind}"),
        LayoutRule("--use-rope-scaling", True, not args.use_rope_scaling or linear is None,
             "none with --rotary-seq-len-interpolation-factor"),
        LayoutRule("--rotary-seq-len-interpolation-factor", linear, linear is None or kind != "yarn",
             "none with --position-embedding-type yarn"),
    ]  # fmt: skip


def _latent_attention(args) -> list[LayoutRule]:
    """Rules on multi-latent attention: its sizes, and what its layers do not compute."""
    on, modules, kind = args.multi_latent_attention, args.recompute_modules or [], args.position_embedding_type
    return [
        *(_only_with(args, name, on, LATENT) for name in (*LATENT_SIZES, "latent-norm-epsilon")),
        *(min_value(f"--{name}", value_of(args, name)) for name in LATENT_SIZES[:4]),  # the last one is a layout rule's
        _positive(args, "latent-norm-epsilon"),
        *(LayoutRule(f"--{name}", value_of(args, name), not on or value_of(args, name) % 2 == 0, "an even number")
          for name in ("kv-lora-rank", "qk-pos-emb-head-dim")),
        *(LayoutRule(f"--{name}", value, not on or value == default, f"none with {LATENT}")
          for name, default in NOT_LATENT.items() for value in [value_of(args, name)]),
        LayoutRule("--recompute-modules", " ".join(modules), not on or "mla_up_proj" not in modules,
             f"core_attn without mla_up_proj with {LATENT}: it expands latents again, too"),
        LayoutRule("--position-embedding-type", kind, not on or kind in ROTARY, f"{' or '.join(ROTARY)} with {LATENT}"),
    ]  # fmt: skip


def _positive(args, name: str) -> LayoutRule:
    value = value_of(args, name)
    return LayoutRule(f"--{name}", value, value is None or 0 < value < math.inf, "above 0")


def _or(value, default):
    return default if value is None else value


def _only_with(args, name: str, holds: bool, flag: str) -> LayoutRule:
    """A flag that has no effect without another one."""
    value = value_of(args, name)
    return LayoutRule(f"--{name}", value, holds or value == DEFAULTS.get(name), f"none without {flag}")
