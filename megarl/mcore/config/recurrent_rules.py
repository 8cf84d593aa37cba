"""Rules on models with recurrent states: sizes, and what such models cannot be combined with."""

from megarl import bundled
from megarl.errors import Rule, UsageError
from megarl.mcore import device
from megarl.mcore.config.rules import allow, defaults, min_value, only, value_of, when
from megarl.mcore.recurrence import fused_chunks

FLAG, GATED_DELTA_NET = "--experimental-attention-variant", "gated_delta_net"
TAPS = "linear-conv-kernel-dim"  # of both kinds
_HEADS = {"linear-num-key-heads": 16, "linear-num-value-heads": 32}
SIZES = {TAPS: 4, "linear-key-head-dim": 128, "linear-value-head-dim": 128} | _HEADS  # Megatron's defaults
PATTERN, LETTERS = "--hybrid-layer-pattern", {"M", "*", "-", "E"}
SPACE_SIZES = {"mamba-state-dim": 128, "mamba-head-dim": 64, "mamba-num-groups": 8, "mamba-num-heads": None}
CHANNEL_DECAY = "--linear-channel-decay"
RULE = "--delta-rule-backend"
MODULE = "--model-source transformers: the module of"
RULE_BACKENDS = ("torch", fused_chunks.BACKEND)
VECTOR, MAX_TAPS = 16, 8  # of the compiled kernels: elements of a vector, tokens that a convolution reads


def add_to(parser):
    """Adds the flag of megarl's own about these layers to an argparse parser."""
    what = "kernels of gated delta nets on CUDA in prompts and training: PyTorch's operators, or with --bf16 those "
    what += "of flash-linear-attention, of the extra recurrent"
    group = parser.add_argument_group("megarl's layers")
    group.add_argument(RULE, choices=RULE_BACKENDS, default=RULE_BACKENDS[0], help=what)


def has_states(args) -> bool:
    """Whether a model with this Megatron namespace has layers with a recurrent state."""
    return args.experimental_attention_variant is not None or args.hybrid_layer_pattern is not None


def keeps_states(args) -> bool:
    """Whether a role's model has recurrent states: those of Megatron's layers, or of a module of transformers."""
    return has_states(args) or args.model_folder is not None and bool(args.model_folder.reach().state_shapes)


def flag_of(args) -> str:
    """The flag, with its value, that gives a model its layers with a recurrent state."""
    if args.model_folder is not None:
        return f"{MODULE} {args.model_folder}"
    variant = args.experimental_attention_variant
    return f"{PATTERN} {args.hybrid_layer_pattern}" if variant is None else f"{FLAG} {variant}"


def rules(args) -> list[Rule]:
    """Returns all rules for a role's parsed namespace, before Megatron's own validation; their number is constant."""
    gate, freq = args.attention_output_gate, args.linear_attention_freq
    on, where = args.experimental_attention_variant is not None, f"with {flag_of(args)}"
    is_space = args.hybrid_layer_pattern is not None
    return [
        *(allow(f"--{name}", on or value_of(args, name) == default or is_space and name == TAPS,
                f"none without {FLAG}") for name, default in SIZES.items()),
        allow("--linear-attention-freq", on or freq is None, f"none without {FLAG}"),
        *defaults(args, SPACE_SIZES | {"mamba-dt-min": 0.0}, is_space, f"none without {PATTERN}"),
        *_of_spaces(args, is_space),
        *(min_value(args, f"--{name}") for name in SIZES),
        *_of_layers(args, on),
        *_of_channels(args, on),
        *(each._replace(reason=f"{each.reason} {where}") for each in when(has_states(args), _combinations(args))),
        allow("--attention-output-gate", not gate or not args.qk_layernorm_all_heads,
              "none with --qk-layernorm-all-heads"),
        allow("--attention-output-gate", not gate or not args.add_bias_linear and not args.add_qkv_bias,
              "none with biases of queries, keys and values"),
    ]  # fmt: skip


def _of_spaces(args, on: bool) -> list[Rule]:
    """Of models whose layers have one half each: Mamba-2, attention, an MLP or experts."""
    pattern, layers, experts = args.hybrid_layer_pattern or "", args.num_layers, args.num_experts
    groups, heads = args.mamba_num_groups, args.mamba_num_heads
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    found = [
        allow(PATTERN, len(pattern) == layers and set(pattern) <= LETTERS and "M" in pattern,
              f"for each of --num-layers {layers} M (Mamba-2), * (attention), - (MLP) or E (experts), at least one M"),
        allow(PATTERN, ("E" in pattern) == bool(experts), "one with E if and only if --num-experts is given"),
        allow(PATTERN, args.experimental_attention_variant is None, f"none with {FLAG}"),
        allow("--moe-layer-freq", args.moe_layer_freq == 1, f"none with {PATTERN}"),
        *(allow(f"--{name}", (value_of(args, name) or 0) > 0, "1 or more") for name in SPACE_SIZES),
        allow("--mamba-num-groups", groups % (tensor * context) == 0,
              f"a multiple of --tensor-model-parallel-size {tensor} × --context-parallel-size {context}"),
        allow("--mamba-num-heads", not heads or not groups or heads % groups == 0,
              f"a multiple of --mamba-num-groups {groups}"),
        allow("--mamba-head-dim", args.mamba_head_dim % VECTOR == 0, f"a multiple of {VECTOR}"),
    ]  # fmt: skip
    return [*when(on, found), allow("--mamba-dt-min", 0 <= args.mamba_dt_min < float("inf"), "0 or more")]


def _of_layers(args, on: bool) -> list[Rule]:
    freq, layers, context = args.linear_attention_freq, args.num_layers, args.context_parallel_size
    tensor, backend, channels = args.tensor_model_parallel_size, args.delta_rule_backend, args.linear_key_head_dim
    keys, values = args.linear_num_key_heads, args.linear_num_value_heads
    fits = freq and (1 < freq <= layers if isinstance(freq, int) else {*freq} == {0, 1} and len(freq) == layers)
    wide = f"torch with --linear-key-head-dim {channels}, above {fused_chunks.MAX_KEYS}"
    of_backend = [
        allow(RULE, on, f"torch without {FLAG}"),
        allow(RULE, args.bf16, "torch without --bf16"),
        allow(RULE, channels <= fused_chunks.MAX_KEYS, wide),
    ]
    of_nets = [
        allow("--linear-attention-freq", fits,
              f"a number from 2 to --num-layers {layers}, or a pattern of {layers} ones (a recurrent state) and zeros"),
        allow("--linear-num-key-heads", keys % (tensor * context) == 0,
              f"a multiple of --tensor-model-parallel-size {tensor} × --context-parallel-size {context}"),
        allow("--linear-num-value-heads", keys > 0 and values % keys == 0,
              f"a multiple of --linear-num-key-heads {keys}"),
        allow("--linear-value-head-dim", args.linear_value_head_dim % VECTOR == 0, f"a multiple of {VECTOR}"),
    ]  # fmt: skip
    taps = allow("--linear-conv-kernel-dim", 2 <= args.linear_conv_kernel_dim <= MAX_TAPS, f"from 2 to {MAX_TAPS}")
    return when(backend == fused_chunks.BACKEND, of_backend) + when(on, of_nets) + when(has_states(args), [taps])


def _of_channels(args, on: bool) -> list[Rule]:
    """Of gated delta nets with a decay of each channel of a key."""
    is_kda, rank, bound = args.linear_channel_decay, args.linear_gate_rank, args.linear_decay_bound
    keys, values, groups = args.linear_key_head_dim, args.linear_value_head_dim, args.linear_num_key_heads
    heads, none = args.linear_num_value_heads, f"none without {CHANNEL_DECAY}"
    unequal = f"none with --linear-num-key-heads {groups}, --linear-num-value-heads {heads}: each value has a key"
    narrow = f"none with --linear-key-head-dim {keys}, --linear-value-head-dim {values}: they are equal"
    found = [
        allow(CHANNEL_DECAY, on, f"none without {FLAG}"),
        allow(CHANNEL_DECAY, groups == heads, unequal),
        allow(CHANNEL_DECAY, keys == values, narrow),
        allow(RULE, args.delta_rule_backend == RULE_BACKENDS[0], f"torch with {CHANNEL_DECAY}"),
    ]
    return [
        *when(is_kda, found),
        allow("--linear-gate-rank", rank is None or is_kda, none),
        min_value(args, "--linear-gate-rank"),
        allow("--linear-decay-bound", bound is None or is_kda, none),
        allow("--linear-decay-bound", bound is None or -80 <= bound < 0, "below 0, -80 or more"),
    ]


def _combinations(args) -> list[Rule]:
    """Rules on other flags, beside recurrent states."""
    modules = args.recompute_modules or []
    return [
        only(args, "--transformer-impl", "local"),
        allow("--fp16", not args.fp16, "--bf16 or fp32: decays overflow,"),
        allow(
            "--multi-latent-attention",
            not args.multi_latent_attention or args.linear_channel_decay,
            f"none without {CHANNEL_DECAY}",
        ),
        only(args, "--layernorm-position", "pre"),
        only(args, "--normalization", "RMSNorm"),
        allow("--disable-bias-linear", not args.add_bias_linear, "given", value=False),
        allow("--recompute-modules", "gdn_norm_out" not in modules, "others than gdn_norm_out", " ".join(modules)),
    ]


def check_backend(role: str, args):
    """Raises UsageError if this machine has not what the flags of a role's namespace ask for."""
    if args.delta_rule_backend != fused_chunks.BACKEND:
        return
    if not device.has_cuda():
        raise UsageError(f"{role}: {RULE} {fused_chunks.BACKEND}: needs a CUDA device; a CPU has kernels of its own")
    if fused_chunks.version() is None:
        raise UsageError(
            f"{role}: {RULE} {fused_chunks.BACKEND}: needs the package {fused_chunks.PACKAGE}"
            f" {fused_chunks.MIN_VERSION} or later; run {bundled.install_command('recurrent')}"
        )


def load_backends(namespaces: list) -> str | None:
    """Loads the kernels of gated delta nets that roles name. Returns what computes these layers on a device in prompts
    and training, in words; None: no role has such layers."""
    names = {args.delta_rule_backend for args in namespaces if args.experimental_attention_variant is not None}
    if fused_chunks.BACKEND in names:
        fused_chunks.load()
    words = {"torch": "PyTorch's operators", fused_chunks.BACKEND: f"{fused_chunks.PACKAGE} {fused_chunks.version()}"}
    return ", ".join(words[name] for name in RULE_BACKENDS if name in names) or None


def check_run(settings, megatron: dict):
    """Raises UsageError for settings of a run that its models cannot have; `megatron`: namespaces of roles."""
    count, actor = settings.rollout_state_snapshots, megatron.get("actor")
    if count is not None and actor is not None and not keeps_states(actor):
        raise UsageError(f"--rollout-state-snapshots {count}: needs {FLAG} or {PATTERN}, or a module with states")
    for role, args in megatron.items() if settings.deterministic else ():
        if args.delta_rule_backend == fused_chunks.BACKEND:
            raise UsageError(
                f"{role}: {RULE} {fused_chunks.BACKEND}: allowed is torch with --deterministic: which of its kernels"
                " run is decided by times"
            )
