"""Rules on flags that describe a model's layers: values that the layers compute, and flags that would have no effect.

A rule is data, as in `layout_rules`.
"""

from megarl.errors import Rule
from megarl.mcore.config.model_flags import ROTARY, divisors_of, is_gated
from megarl.mcore.config.rules import allow, defaults, is_pattern, min_value, positive, value_of

# Flags that are for one kind of model, and their defaults.
ROTARY_FLAGS = {"rotary-base": 10000, "rotary-percent": 1.0, "rotary-seq-len-interpolation-factor": None,
                "no-rope-freq": None}  # fmt: skip
LLAMA3_FLAGS = {"rope-low-freq-factor": None, "rope-high-freq-factor": None,
                "rope-original-max-position-embeddings": None, "rope-scaling-factor": 8.0}  # fmt: skip
YARN_FLAGS = {"yarn-original-max-position-embeddings": None, "yarn-beta-fast": None, "yarn-beta-slow": None,
              "yarn-correction-range-round-to-int": None, "rotary-scaling-factor": 1.0, "mscale": 1.0,
              "mscale-all-dim": 0.0}  # fmt: skip
LATENT = "--multi-latent-attention"
LATENT_SIZES = {"q-lora-rank": None, "kv-lora-rank": 32, "qk-head-dim": 128, "qk-pos-emb-head-dim": 64,
                "v-head-dim": 128}  # fmt: skip
NOT_LATENT = {
    "group-query-attention": False, "add-qkv-bias": False, "qk-layernorm-all-heads": False, "window-size": None,
    "no-rope-freq": None, "query-pre-attn-scalar": None, "rotary-percent": 1.0, "attn-logit-softcapping": None,
    "softmax-type": "vanilla",
}  # fmt: skip


def rules(args) -> list[Rule]:
    """Returns all rules for a role's parsed namespace, before Megatron's own validation; their number is constant."""
    return _windows(args) + _layers(args) + _experts(args) + _rotary(args) + _latent_attention(args)


def _windows(args) -> list[Rule]:
    size, freq, layers = args.window_size, args.window_attn_skip_freq, args.num_layers
    fits = freq is None or (freq > 1 if isinstance(freq, int) else is_pattern(freq, layers) and 1 in freq)
    return [
        allow("--window-size", size is None or len(size) == 2 and size[0] >= 0 and size[1] == 0,
              "N,0 with N of 0 or more: a token sees itself and the N tokens before it"),
        allow("--window-attn-skip-freq", freq is None or size is not None, "none without --window-size"),
        allow("--window-attn-skip-freq", fits,
              f"a number above 1, or a pattern of {layers} zeros (full attention) and ones, with a one"),
    ]  # fmt: skip


def _layers(args) -> list[Rule]:
    all_heads, kind, modules = args.qk_layernorm_all_heads, args.normalization, args.recompute_modules or []
    idle = modules and not args.recompute_activations and args.recompute_granularity is None
    others = [name for name in ("swiglu", "squared-relu", "quick-geglu") if value_of(args, name)]
    return [
        *defaults(args, {"num-query-groups": 1}, args.group_query_attention, "none without --group-query-attention"),
        *(positive(args, f"--{name}") for name in ("embedding-multiplier", "attn-logit-softcapping",
                                            "final-logit-softcapping", "query-pre-attn-scalar")),
        allow("--qk-layernorm-all-heads", not all_heads or not args.qk_layernorm,
              "none with --qk-layernorm, which norms each head"),
        allow("--qk-layernorm-all-heads", not all_heads or kind == "RMSNorm",
              f"none with --normalization {kind}: it is an RMSNorm"),
        allow("--qk-layernorm-all-heads", not all_heads or not args.layernorm_zero_centered_gamma,
              "none with --apply-layernorm-1p"),
        allow("--recompute-modules", "layernorm" not in modules,
              "none with layernorm: norms are recomputed with the rest of their layer", value=" ".join(modules)),
        allow("--recompute-modules", not idle, "none without --recompute-granularity",
              value=" ".join(modules)),
        allow("--geglu", not args.geglu or not others, f"none with --{' --'.join(others)}"),
    ]  # fmt: skip


def _experts(args) -> list[Rule]:
    has_biases, ranks = args.num_experts and args.add_bias_linear, args.expert_tensor_parallel_size
    shared, clamp = args.moe_shared_expert_intermediate_size, args.activation_func_clamp_value
    return [
        allow("--expert-tensor-parallel-size", not has_biases or ranks == 1,
              "1 without --disable-bias-linear: each rank would add an expert's bias"),
        allow("--moe-shared-expert-intermediate-size", not has_biases or shared is None,
              "none without --disable-bias-linear: shared experts have no biases"),
        allow("--glu-linear-offset", args.glu_linear_offset == 0 or is_gated(args),
              "0 without a gated MLP, as of --quick-geglu"),
        allow("--activation-func-clamp-value", clamp is None or is_gated(args) and clamp > 0,
              "above 0, with a gated MLP, as of --quick-geglu"),
        *defaults(args, {"moe-router-group-score": "sum"}, bool(args.moe_router_num_groups),
                  "sum without --moe-router-num-groups"),
    ]  # fmt: skip


def _rotary(args) -> list[Rule]:
    kind, window_base, linear = (
        args.position_embedding_type, args.window_rotary_base, args.rotary_seq_len_interpolation_factor
    )  # fmt: skip
    divisors, scale = args.rotary_divisors, args.rotary_attention_factor
    channels = args.kv_channels or args.hidden_size // max(args.num_attention_heads, 1)
    pairs = int(channels * args.rotary_percent) // 2
    is_plain = kind == "rope" and not args.use_rope_scaling and linear is None and window_base is None
    low, high = _or(args.rope_low_freq_factor, 1.0), _or(args.rope_high_freq_factor, 4.0)
    fast, slow = _or(args.yarn_beta_fast, 32.0), _or(args.yarn_beta_slow, 1.0)
    return [
        allow("--rotary-base", args.rotary_base > 1, "above 1"),
        allow("--rotary-percent", 0 < args.rotary_percent <= 1, "above 0, at most 1"),
        allow("--window-rotary-base", window_base is None or window_base > 1, "above 1"),
        allow("--window-rotary-base", window_base is None or args.window_size is not None and kind in ROTARY,
              "none without --window-size and rotary embeddings"),
        min_value(args, "--rotary-seq-len-interpolation-factor"),
        min_value(args, "--rope-scaling-factor"),
        *defaults(args, LLAMA3_FLAGS, args.use_rope_scaling, "none without --use-rope-scaling"),
        allow("--rope-high-freq-factor", 0 < low < high,
              f"above --rope-low-freq-factor {low}, which is above 0", value=high),
        min_value(args, "--rope-original-max-position-embeddings"),
        *defaults(args, YARN_FLAGS, kind == "yarn", "none without --position-embedding-type yarn"),
        *defaults(args, ROTARY_FLAGS, kind in ROTARY,
                  f"none with --position-embedding-type {kind}: it is for rotary embeddings"),
        allow("--rotary-divisors", divisors is None or len(divisors_of(divisors)) == pairs,
              f"{pairs} numbers above 0, one for each pair of rotated channels"),
        *defaults(args, {"rotary-divisors": None, "rotary-attention-factor": None},
                  is_plain and not args.multi_latent_attention,
                  "none with another scaling, --window-rotary-base or --multi-latent-attention"),
        allow("--rotary-attention-factor", scale is None or scale > 0, "above 0"),
        min_value(args, "--rotary-scaling-factor"),
        allow("--yarn-beta-fast", fast > slow > 0, f"above --yarn-beta-slow {slow}, which is above 0", value=fast),
        min_value(args, "--yarn-original-max-position-embeddings"),
        allow("--use-rope-scaling", not args.use_rope_scaling or kind == "rope",
              f"none with --position-embedding-type {kind}"),
        allow("--use-rope-scaling", not args.use_rope_scaling or linear is None,
              "none with --rotary-seq-len-interpolation-factor"),
        allow("--rotary-seq-len-interpolation-factor", linear is None or kind != "yarn",
              "none with --position-embedding-type yarn"),
    ]  # fmt: skip


def _latent_attention(args) -> list[Rule]:
    """Rules on multi-latent attention: its sizes, and what its layers do not compute."""
    on, modules, kind = args.multi_latent_attention, args.recompute_modules or [], args.position_embedding_type
    return [
        *defaults(args, LATENT_SIZES | {"latent-norm-epsilon": None}, on, f"none without {LATENT}"),
        *(min_value(args, f"--{name}") for name in [*LATENT_SIZES][:4]),  # the last one is a layout rule's
        positive(args, "--latent-norm-epsilon"),
        *(allow(f"--{name}", not on or value_of(args, name) % 2 == 0, "an even number")
          for name in ("kv-lora-rank", "qk-pos-emb-head-dim")),
        *defaults(args, NOT_LATENT, not on, f"none with {LATENT}"),
        allow("--recompute-modules", not on or "mla_up_proj" not in modules,
              f"core_attn without mla_up_proj with {LATENT}: it expands latents again, too", value=" ".join(modules)),
        allow("--position-embedding-type", not on or kind in ROTARY, f"{' or '.join(ROTARY)} with {LATENT}"),
    ]  # fmt: skip


def _or(value, default):
    return default if value is None else value
