"""Flags that describe a model's layers: those that Megatron's parser lacks, and rules on the values of all of them.

Flags of megarl's own join Megatron's parser, so they may carry role prefixes. Each becomes an attribute of the role's
namespace and of the model's config. A flag that would have no effect in a model is refused.
"""

import re

from megarl.errors import Rule, UsageError
from megarl.mcore.config.rules import allow, defaults, is_pattern, min_value, only, positive, require, value_of, when
from megarl.mcore.kernels.batch_invariance import VECTOR


def number(text: str) -> int | float:
    """Parses an int, or a float if it is not whole."""
    value = float(text)
    return int(value) if value.is_integer() else value


def pattern(text: str) -> list[int]:
    """Parses numbers with commas between them, with brackets or without."""
    return [int(each) for each in text.strip("[]").split(",")]


def divisors_of(text: str) -> list[float]:
    """The numbers of `--rotary-divisors`; empty if they are none above 0."""
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        return []
    return found if all(0 < each < float("inf") for each in found) else []


# Flag, without its dashes -> what it means, and how argparse reads it.
MODEL_FLAGS: dict[str, tuple[str, dict]] = {
    "layernorm-position": ("norms of a layer: before attention and MLP, after them (OLMo 2), or both (Gemma 2)",
                           {"default": "pre", "choices": ("pre", "post", "sandwich")}),
    "qk-layernorm-all-heads": ("RMSNorm of queries and of keys, over all heads (OLMo 2)", {"action": "store_true"}),
    "latent-norm-epsilon": ("epsilon of the norms of latents (default --norm-epsilon)", {"type": float}),
    "embedding-multiplier": ("factor of the embeddings, rounded to their type (Gemma)", {"type": float}),
    "geglu": ("gated MLP with GELU (Gemma)", {"action": "store_true"}),
    "gelu-approximation": ("form of GELU, as PyTorch names them: none is the exact one, with erf; default: tanh with "
                           "--geglu, else none", {"choices": ("none", "tanh")}),
    "attn-logit-softcapping": ("c of attention scores c·tanh(score/c) (Gemma 2)", {"type": float}),
    "final-logit-softcapping": ("c of logits c·tanh(logit/c) (Gemma 2)", {"type": float}),
    "query-pre-attn-scalar": ("attention scores are divided by its root (default --kv-channels)", {"type": float}),
    "window-rotary-base": ("rotary base, without scaling, of layers with a window (Gemma 3)", {"type": number}),
    "rotary-divisors": ("numbers, with commas between them, that divide the frequencies of pairs of rotated channels "
                        "(LongRoPE)", {}),
    "rotary-attention-factor": ("factor of cosines and sines (LongRoPE; default 1, or YaRN's)", {"type": float}),
    "moe-router-group-score": ("score of --moe-router-num-groups: of its best experts, their sum (DeepSeek-V3) or the "
                               "largest (DeepSeek-V2)", {"default": "sum", "choices": ("sum", "max")}),
    "dsa-indexer-layers": ("a zero or a one for each layer: which have an indexer; others use the choice of the last "
                           "one before (GLM-5; default: all)", {"type": pattern}),
    "linear-channel-decay": ("gated delta nets with a decay of each channel of a key, and output gates of a sigmoid "
                             "(Kimi delta attention)", {"action": "store_true"}),
    "linear-gate-rank": ("channels of the latents from which decays and output gates of --linear-channel-decay come "
                         "(Kimi-Linear; default: from hidden states)", {"type": int}),
    "linear-decay-bound": ("lowest logarithm of a decay of --linear-channel-decay, which is this times a sigmoid (Ling"
                           " 3; default: none, minus a softplus)", {"type": float}),
    "mamba-dt-min": ("smallest time step Δ of the Mamba-2 layers of --hybrid-layer-pattern (Nemotron-H)",
                     {"type": float, "default": 0.0}),
    "rope-low-freq-factor": ("of --use-rope-scaling (default 1)", {"type": float}),
    "rope-high-freq-factor": ("of --use-rope-scaling (default 4)", {"type": float}),
    "rope-original-max-position-embeddings": ("of --use-rope-scaling (default 8192)", {"type": int}),
}  # fmt: skip
SCORE_BACKENDS = ("eager",)  # attention backends for models that `has_score_options`
ROTARY = ("rope", "yarn")  # values of --position-embedding-type with rotary embeddings
# Flags that are for one kind of model, and their defaults.
_LINEAR = {"rotary-seq-len-interpolation-factor": None}
ROTARY_FLAGS = {"rotary-base": 10000, "rotary-percent": 1.0} | _LINEAR | {"no-rope-freq": None}
_FACTORS = ("rope-low-freq-factor", "rope-high-freq-factor", "rope-original-max-position-embeddings")
LLAMA3_FLAGS = dict.fromkeys(_FACTORS) | {"rope-scaling-factor": 8.0}
_YARN = ("original-max-position-embeddings", "beta-fast", "beta-slow", "correction-range-round-to-int")
YARN_FLAGS = {f"yarn-{name}": None for name in _YARN} | {
    "rotary-scaling-factor": 1.0,
    "mscale": 1.0,
    "mscale-all-dim": 0.0,
}
LATENT = "--multi-latent-attention"
INDEXER = "--dsa-indexer-topk"
INDEXER_FLAGS = {"dsa-indexer-n-heads": None, "dsa-indexer-head-dim": None, "dsa-indexer-rope-interleaved": False,
                 "dsa-indexer-layers": None}  # fmt: skip
_HEADS = {"qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128}
LATENT_SIZES = {"q-lora-rank": None, "kv-lora-rank": 32} | _HEADS
_EVEN = ("kv-lora-rank", "qk-pos-emb-head-dim")
NOT_LATENT = {
    "group-query-attention": False, "add-qkv-bias": False, "qk-layernorm-all-heads": False, "window-size": None,
    "no-rope-freq": None, "query-pre-attn-scalar": None, "rotary-percent": 1.0, "attn-logit-softcapping": None,
    "softmax-type": "vanilla",
}  # fmt: skip


def add_to(parser):
    """Adds the flags to an argparse parser; numbers of rotary embeddings need not be whole."""
    for action in parser._actions:
        if action.dest in ("rotary_base", "rotary_seq_len_interpolation_factor"):
            action.type = number
    group = parser.add_argument_group("megarl's layers")
    for name, (text, options) in MODEL_FLAGS.items():
        group.add_argument(f"--{name}", help=text, **options)


def attributes() -> frozenset[str]:
    """The attributes that the flags set."""
    return frozenset(name.replace("-", "_") for name in MODEL_FLAGS)


def has_score_options(args) -> bool:
    """Whether attention scores are more than scaled products: a softcap or sinks."""
    return args.attn_logit_softcapping is not None or args.softmax_type != "vanilla"


def is_gated(args) -> bool:
    """Whether MLPs have a gate."""
    return args.swiglu or args.quick_geglu or args.geglu


def has_gelu(args) -> bool:
    """Whether the activation of MLPs is GELU, with a gate or without."""
    return not (args.swiglu or args.squared_relu or args.quick_geglu)


def is_gelu_exact(args) -> bool:
    """Whether it is the exact one."""
    return (args.gelu_approximation or ("tanh" if args.geglu else "none")) == "none"


def copy_to(config, args):
    """Sets the flags' attributes on a model's config."""
    for name in attributes():
        setattr(config, name, getattr(args, name))


# -- rules -------------------------------------------------------------------------------------------------------


def rules(args) -> list[Rule]:
    """Returns all rules for a role's parsed namespace, before Megatron's own validation; their number is constant."""
    return (
        _windows(args) + _layers(args) + _experts(args) + _rotary(args) + _latent_attention(args) + _chosen_keys(args)
    )


def _windows(args) -> list[Rule]:
    size, freq, layers = args.window_size, args.window_attn_skip_freq, args.num_layers
    fits = freq is None or (freq > 1 if isinstance(freq, int) else is_pattern(freq, layers) and 1 in freq)
    causal = "N,0 with N of 0 or more: a token sees itself and the N tokens before it"
    pattern = f"a number above 1, or a pattern of {layers} zeros (full attention) and ones, with a one"
    return [
        allow("--window-size", size is None or len(size) == 2 and size[0] >= 0 and size[1] == 0, causal),
        allow("--window-attn-skip-freq", freq is None or size is not None, "none without --window-size"),
        allow("--window-attn-skip-freq", fits, pattern),
    ]


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
        *defaults(args, {"gelu-approximation": None}, not others, f"none with --{' --'.join(others)}"),
    ]  # fmt: skip


def _experts(args) -> list[Rule]:
    has_biases, ranks = args.num_experts and args.add_bias_linear, args.expert_tensor_parallel_size
    shared, clamp = args.moe_shared_expert_intermediate_size, args.activation_func_clamp_value
    whole = "1 without --disable-bias-linear: each rank would add an expert's bias"
    gated, score = "a gated MLP, as of --quick-geglu", {"moe-router-group-score": "sum"}
    alone = "none without --disable-bias-linear: shared experts have no biases"
    return [
        allow("--expert-tensor-parallel-size", not has_biases or ranks == 1, whole),
        allow("--moe-shared-expert-intermediate-size", not has_biases or shared is None, alone),
        allow("--glu-linear-offset", args.glu_linear_offset == 0 or is_gated(args), f"0 without {gated}"),
        allow("--activation-func-clamp-value", clamp is None or is_gated(args) and clamp > 0, f"above 0, with {gated}"),
        *defaults(args, score, bool(args.moe_router_num_groups), "sum without --moe-router-num-groups"),
    ]


def _rotary(args) -> list[Rule]:
    kind, window_base = args.position_embedding_type, args.window_rotary_base
    linear, divisors, scale = (
        args.rotary_seq_len_interpolation_factor,
        args.rotary_divisors,
        args.rotary_attention_factor,
    )
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
        allow("--yarn-beta-fast", fast >= slow > 0, f"--yarn-beta-slow {slow}, which is above 0, or more", value=fast),
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
    once = f"core_attn without mla_up_proj with {LATENT}: it expands latents again, too"
    return [
        *defaults(args, LATENT_SIZES | {"latent-norm-epsilon": None}, on, f"none without {LATENT}"),
        *(min_value(args, f"--{name}") for name in [*LATENT_SIZES][:4]),  # the last one is a layout rule's
        positive(args, "--latent-norm-epsilon"),
        *(allow(f"--{name}", not on or value_of(args, name) % 2 == 0, "an even number") for name in _EVEN),
        *defaults(args, NOT_LATENT, not on, f"none with {LATENT}"),
        allow("--recompute-modules", not on or "mla_up_proj" not in modules, once, value=" ".join(modules)),
        allow(
            "--position-embedding-type",
            not on or kind in (*ROTARY, "none"),
            f"{', '.join(ROTARY)} or none with {LATENT}",
        ),
    ]


def _chosen_keys(args) -> list[Rule]:
    """Rules on the indexers of multi-latent attention, which choose the keys of queries."""
    on, layers, has_latents = args.dsa_indexer_topk is not None, args.num_layers, args.multi_latent_attention
    pattern, heads, rotated = args.dsa_indexer_layers, args.dsa_indexer_n_heads or 0, args.qk_pos_emb_head_dim
    channels, fits = args.dsa_indexer_head_dim or 0, pattern is None or is_pattern(pattern, layers) and pattern[0] == 1
    ranks = args.tensor_model_parallel_size
    found = [
        allow(INDEXER, has_latents and args.q_lora_rank, f"none without {LATENT} and --q-lora-rank"),
        allow(INDEXER, args.position_embedding_type in ROTARY,
              f"none with --position-embedding-type {args.position_embedding_type}"),
        allow(INDEXER, args.experimental_attention_variant is None, "none with --experimental-attention-variant"),
        allow("--dsa-indexer-n-heads", heads > 0, f"1 or more with {INDEXER}"),
        allow("--dsa-indexer-n-heads", heads % ranks == 0, f"a multiple of --tensor-model-parallel-size {ranks}"),
        allow("--dsa-indexer-head-dim", channels % VECTOR == 0 and channels >= rotated,
              f"a multiple of {VECTOR}, --qk-pos-emb-head-dim {rotated} or more, with {INDEXER}"),
        allow("--attention-backend", args.attention_kernel == "sdpa", f"auto or sdpa with {INDEXER}",
              value=args.attention_kernel),
    ]  # fmt: skip
    of_layers = f"a zero or a one for each of {layers} layers, the first of them one"
    return [
        *defaults(args, INDEXER_FLAGS, on, f"none without {INDEXER}"),
        min_value(args, INDEXER),
        *when(on, found),
        allow("--dsa-indexer-layers", fits, of_layers),
    ]


def _or(value, default):
    return default if value is None else value


# -- multi-token prediction --------------------------------------------------------------------------------------


def check_prediction(settings, megatron: dict, lora: dict, hf_models: dict):
    """Raises UsageError for what policy and rollout cannot have beside a layer of multi-token prediction; `megatron`,
    `lora`, `hf_models`: namespaces, factors and folders of roles."""
    if not settings.predicts:
        return
    flag = "--mtp-train" if settings.mtp_train else "--mtp-drafts"
    for role in (role for role in ("actor", "rollout") if role in megatron):
        require(role, megatron[role], _prediction_rules(megatron[role]), f"with {flag} ")
    if settings.debug_rollout_only:
        raise UsageError(f"{flag}: not with --debug-rollout-only")
    if lora.get("actor") is not None:
        raise UsageError(f"{flag}: not yet with --lora-rank {lora['actor'].rank}, which trains factors alone")
    if (folder := hf_models.get("actor")) is not None:
        _check_folder(flag, folder)
    elif not (settings.mtp_train or settings.load or megatron["actor"].pretrained_checkpoint):
        raise UsageError("--mtp-drafts: nothing has trained the layer; give --mtp-train, or a model that has it")


def _prediction_rules(args) -> list[Rule]:
    why = "1: the layer reads the embedding and the last hidden states"
    return [
        allow("--pipeline-model-parallel-size", args.pipeline_model_parallel_size == 1, why),
        only(args, "--use-torch-fsdp2", False),
        only(args, "--transformer-impl", "local"),
        only(args, "--layernorm-position", "pre"),
        only(args, "--window-size"),
        only(args, "--hybrid-layer-pattern"),
        allow("--no-rope-freq", not args.no_rope_freq, "none"),
    ]


def _check_folder(flag: str, model):
    """UsageError unless a folder, an `HFModel`, has one layer."""
    prediction, folder = model.prediction, model.folder
    names = filter(None, map(model.naming.plain, folder.weights)) if folder.has_weights else ()
    layers = {re.search(r"layers\.(\d+)\.|$", name)[1] for name in names if prediction.has(name)} - {None}
    if not layers:
        raise folder.error(f"has no tensors of multi-token prediction, which {flag} needs")
    if not prediction.layer:
        raise folder.error(f"has a layer of multi-token prediction that exports keep and {flag} does not compute")
    if len(layers) > 1:
        raise folder.error(f"has {len(layers)} layers of multi-token prediction; {flag} allows 1")
