"""Rules on a role's flags that Megatron checks late, with unclear messages, or not at all: divisibility and ranges.

A rule is data: `rules` always returns all rules in the same order; `check` raises the first broken one.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist

from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.config.model_flags import ROTARY

TRAINED = ("actor", "critic")  # roles that run backward
MAX_LAYERS = 100_000
# Sizes of 1 or more, if they are given.
SIZES = ("ffn-hidden-size", "moe-ffn-hidden-size", "make-vocab-size-divisible-by", "tensor-model-parallel-size",
         "pipeline-model-parallel-size", "context-parallel-size", "expert-model-parallel-size",
         "expert-tensor-parallel-size")  # fmt: skip
GROUPED_ALIGNED = 8  # sizes of grouped products on CUDA: rows begin at multiples of 16 bytes
BALANCING_LOSSES = ("seq_aux_loss", "global_aux_loss")  # losses that do not depend on the split into micro-batches


class LayoutRule(NamedTuple):
    """A flag, its value, whether the value is allowed, and the allowed values in words."""

    flag: str
    value: object
    holds: bool
    allowed: str


def require(role: str, rules: list[LayoutRule], where: str = ""):
    """Raises UsageError for the first broken rule; `where` the rules hold, for its message."""
    for rule in rules:
        if not rule.holds:
            raise UsageError(f"{role}: {rule.flag} {rule.value}: {where}allowed is {rule.allowed}")


def rules(role: str, args) -> list[LayoutRule]:
    """Returns all rules for a role's parsed namespace, before Megatron's own validation; their number is constant.

    `args.world_size` is the role's.
    """
    groups = (_sizes(args), _ranges(args), _ranks(args), _attention(args), _pipeline(args), _virtual(args))
    groups += (_experts(args), _balancing(args), _training(role, args), _sharding(args))
    return [each for group in groups for each in group]


def _divides(size: int, whole: int) -> bool:
    return size > 0 and whole % size == 0


def value_of(args, flag: str):
    """The value of a flag, with or without its dashes."""
    return getattr(args, flag.removeprefix("--").replace("-", "_"))


def rule(args, flag: str, holds: bool, allowed: str) -> LayoutRule:
    """A rule on a flag, with the value that it has."""
    return LayoutRule(flag, value_of(args, flag), holds, allowed)


def only(args, flag: str, value=None) -> LayoutRule:
    """A flag with one allowed value; None and False: it must not be given."""
    return rule(args, flag, value_of(args, flag) == value, "none" if value in (None, False) else str(value))


def min_value(args, flag: str, limit: int = 1) -> LayoutRule:
    """A flag whose value, if it is given, is a number not below a limit."""
    return _at_least(flag, value_of(args, flag), limit)


def _at_least(flag: str, value, limit: int = 1) -> LayoutRule:
    """As `min_value`, of a value that another flag may have set."""
    return LayoutRule(flag, value, value is None or value >= limit, f"{limit} or more")


def positive(args, flag: str) -> LayoutRule:
    """A flag whose value, if it is given, is a number above 0."""
    value = value_of(args, flag)
    return rule(args, flag, value is None or 0 < value < math.inf, "above 0")


def defaults(args, flags: Mapping[str, object], holds: bool, allowed: str) -> list[LayoutRule]:
    """Flags, without dashes, that must have their defaults unless `holds`."""
    unchanged = {name: value_of(args, name) == default for name, default in flags.items()}
    return [rule(args, f"--{name}", holds or is_default, allowed) for name, is_default in unchanged.items()]


def _sizes(args) -> list[LayoutRule]:
    return [
        rule(args, "--num-layers", 1 <= args.num_layers <= MAX_LAYERS, f"from 1 to {MAX_LAYERS}"),
        *(min_value(args, f"--{name}") for name in ("hidden-size", "num-attention-heads")),
        _at_least("--num-query-groups", _groups(args)),
        _at_least("--v-head-dim" if args.multi_latent_attention else "--kv-channels", args.kv_channels),
        min_value(args, "--num-experts", 0),
        *(min_value(args, f"--{name}") for name in SIZES),
    ]


def _ranges(args) -> list[LayoutRule]:
    lr, floor, decay = args.lr, args.min_lr, args.lr_decay_iters or args.train_iters
    start, fraction, epsilon = args.lr_warmup_init, args.lr_warmup_fraction, args.layernorm_epsilon
    return [
        min_value(args, "--lr-decay-iters"),
        rule(args, "--lr", 0 <= lr < math.inf, "0 or more"),
        rule(args, "--min-lr", 0 <= floor <= lr, f"from 0 to --lr {lr}"),
        rule(args, "--decoupled-min-lr", not args.decoupled_min_lr or bool(args.decoupled_lr),
             "none without --decoupled-lr"),
        rule(args, "--clip-grad", args.clip_grad >= 0, "0 (off) or more"),
        rule(args, "--weight-decay", args.weight_decay >= 0, "0 or more"),
        rule(args, "--adam-beta1", 0 <= args.adam_beta1 < 1, "from 0 to below 1"),
        rule(args, "--adam-beta2", 0 <= args.adam_beta2 < 1, "from 0 to below 1"),
        rule(args, "--adam-eps", args.adam_eps > 0, "above 0"),
        rule(args, "--max-position-embeddings", args.max_position_embeddings >= args.seq_length,
             f"{args.length_flags} = {args.seq_length} or more"),
        rule(args, "--lr-warmup-iters", args.lr_warmup_iters < decay,
             f"below --lr-decay-iters (default --train-iters) {decay}"),
        min_value(args, "--lr-warmup-iters", 0),
        rule(args, "--lr-warmup-init", start is None or 0 <= start <= lr, f"from 0 to --lr {lr}"),
        rule(args, "--lr-wsd-decay-iters", args.lr_decay_style != "WSD" or args.lr_wsd_decay_iters is not None,
             "a number with --lr-decay-style WSD"),
        rule(args, "--lr-warmup-fraction", fraction is None or 0 <= fraction < 1, "from 0 to below 1"),
        rule(args, "--lr-warmup-fraction", fraction is None or not args.lr_warmup_iters, "none with --lr-warmup-iters"),
        rule(args, "--init-method-std", 0 <= args.init_method_std < math.inf, "0 or more"),
        LayoutRule("--norm-epsilon", epsilon, 0 < epsilon < math.inf, "above 0"),
        positive(args, "--loss-scale"),
        rule(args, "--fp16", not args.fp16 or not args.bf16, "none with --bf16"),
        min_value(args, "--distributed-timeout-minutes"),
        min_value(args, "--ddp-bucket-size"),
        LayoutRule("--use-nccl-ub", args.nccl_ub, not args.nccl_ub or device.has_cuda(), "none without CUDA"),
        *(positive(args, f"--{name}") for name in ("initial-loss-scale", "min-loss-scale", "loss-scale-window")),
        *(min_value(args, f"--{name}", 0) for name in ("decoupled-lr", "decoupled-min-lr", "start-weight-decay",
                                                       "end-weight-decay")),
        *(min_value(args, f"--{name}") for name in ("hysteresis", "lr-wsd-decay-iters")),
        _finite(args),
    ]  # fmt: skip


def _finite(args) -> LayoutRule:
    """No flag has NaN or an infinity."""
    wrong = [
        (name, value) for name, value in vars(args).items() if isinstance(value, float) and not math.isfinite(value)
    ]
    name, value = wrong[0] if wrong else ("clip_grad", args.clip_grad)
    return LayoutRule(f"--{name.replace('_', '-')}", value, not wrong, "a finite number")


def _product(flags: dict[str, int], ranks: int) -> LayoutRule:
    """The product of the flags must divide the role's ranks; the message names the flags above 1."""
    *others, last = [item for item in flags.items() if item[1] > 1] or list(flags.items())[:1]
    name = "".join(f"{flag} {size} × " for flag, size in others) + last[0]
    allowed = f"{'a product that divides' if others else 'a divisor of'} the role's {ranks} rank(s)"
    return LayoutRule(name, last[1], _divides(math.prod(flags.values()), ranks), allowed)


def _ranks(args) -> list[LayoutRule]:
    pipeline = {"--pipeline-model-parallel-size": args.pipeline_model_parallel_size}
    dense = {"--tensor-model-parallel-size": args.tensor_model_parallel_size, **pipeline,
             "--context-parallel-size": args.context_parallel_size}  # fmt: skip
    expert = {"--expert-tensor-parallel-size": args.expert_tensor_parallel_size,
              "--expert-model-parallel-size": args.expert_model_parallel_size, **pipeline}  # fmt: skip
    return [_product(dense, args.world_size), _product(expert, args.world_size)]


def _attention(args) -> list[LayoutRule]:
    tensor, heads, groups = args.tensor_model_parallel_size, args.num_attention_heads, _groups(args)
    multiple, ffn = f"a multiple of --tensor-model-parallel-size {tensor}", args.ffn_hidden_size
    channels = args.kv_channels or args.hidden_size // max(heads, 1)
    is_shared = bool(groups) and tensor > groups and _divides(groups, tensor)  # ranks share a group
    ranks = tensor // groups if is_shared else 1
    return [
        rule(args, "--num-attention-heads", _divides(tensor, heads), multiple),
        LayoutRule("--num-query-groups", groups, groups is None or is_shared or _divides(tensor, groups),
             f"{multiple}, or a divisor of it"),
        LayoutRule("--kv-channels", channels, 2 * channels % ranks == 0,
             f"a size whose double is a multiple of the {ranks} tensor-parallel ranks of a query group"),
        LayoutRule("--num-query-groups", groups, groups is None or _divides(groups, heads),
             f"a divisor of --num-attention-heads {heads}"),
        rule(args, "--hidden-size", bool(args.kv_channels) or _divides(heads, args.hidden_size),
             f"a multiple of --num-attention-heads {heads}, or any with --kv-channels"),
        LayoutRule("--kv-channels", channels, args.position_embedding_type not in ROTARY or channels % 2 == 0
             or args.multi_latent_attention, "an even number with rotary embeddings"),
        rule(args, "--make-vocab-size-divisible-by", _divides(tensor, args.make_vocab_size_divisible_by), multiple),
        rule(args, "--ffn-hidden-size", ffn is None or not _has_dense_layers(args) or _divides(tensor, ffn), multiple),
    ]  # fmt: skip


def _pipeline(args) -> list[LayoutRule]:
    """Stages are equal, or the first and last have given sizes."""
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    given, counted = _end_stages(args), _counted_layers(args)
    inner, inner_stages = layers - sum(given), stages - len(given)
    fits = inner == 0 if inner_stages == 0 else inner > 0 and _divides(inner_stages, inner)
    end_size = "from 1 to below --num-layers, with --pipeline-model-parallel-size above 1"
    ends = "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
    return [
        rule(args, "--decoder-first-pipeline-num-layers", first is None or stages > 1 and 0 < first < layers, end_size),
        rule(args, "--decoder-last-pipeline-num-layers", last is None or stages > 1 and 0 < last < layers, end_size),
        LayoutRule("--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split", True,
             counted == layers or not given, f"none of them with {ends}"),
        rule(args, "--num-layers", bool(given) or _divides(stages, counted),
             f"a multiple of --pipeline-model-parallel-size {stages} "
             f"(layers counted: {counted}), or others with {ends}"),
        rule(args, "--num-layers", not given or fits,
             f"one that splits equally: {inner} layer(s) are left for {inner_stages} stage(s) between {ends}"),
    ]  # fmt: skip


def _end_stages(args) -> list[int]:
    """Returns the layers of the first and of the last stage, as far as flags set them."""
    return [x for x in (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers) if x is not None]


def _counted_layers(args) -> int:
    """Returns the layers to split over stages; embedding and loss count as one each if the flags say so."""
    return args.num_layers + args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split


def _stage_sizes(args) -> list[int]:
    """Returns the sizes of given end stages, then of an inner stage; meaningless for flags that break other rules."""
    given = _end_stages(args)
    stages = args.pipeline_model_parallel_size - len(given)
    return given + ([(_counted_layers(args) - sum(given)) // stages] if stages > 0 else [])


def _virtual(args) -> list[LayoutRule]:
    stages, sizes = args.pipeline_model_parallel_size, _stage_sizes(args)
    per_stage, number = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    first, second = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    is_uneven = len(sizes) > 1 or args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    min_stages = 2 if args.overlap_p2p_comm else 3
    flag, value = (first, per_stage) if number is None else (second, number)
    group = args.microbatch_group_size_per_vp_stage
    return [
        LayoutRule("--microbatch-group-size-per-virtual-pipeline-stage", group, group in (None, stages),
             f"--pipeline-model-parallel-size {stages}"),
        _at_least(first, per_stage),
        _at_least(second, number),
        LayoutRule(second, number, None in (per_stage, number), f"one of it and {first}"),
        LayoutRule(flag, value, value is None or value == 1 and flag == second or stages >= min_stages,
             f"none with --pipeline-model-parallel-size {stages}: virtual stages need {min_stages} or more"
             + ("" if min_stages == 2 else " without overlapped communication")),
        LayoutRule(first, per_stage, per_stage is None or not is_uneven,
             f"{second} instead, because stages differ in size"),
        LayoutRule(first, per_stage, per_stage is None or all(_divides(per_stage, size) for size in sizes),
             f"a divisor of the {sizes[0] if sizes else 0} layers of a stage"),
        LayoutRule(second, number, number is None or all(_divides(number, size) for size in sizes),
             f"a divisor of the layers of every stage ({', '.join(map(str, sizes))})"),
    ]  # fmt: skip


def _experts(args) -> list[LayoutRule]:
    experts, size, tensor = args.num_experts or 0, args.expert_model_parallel_size, args.expert_tensor_parallel_size
    ffn, latent = args.moe_ffn_hidden_size or args.ffn_hidden_size, args.moe_latent_size
    shared, dense = args.moe_shared_expert_intermediate_size, args.tensor_model_parallel_size
    topk, groups, chosen = args.moe_router_topk, args.moe_router_num_groups, args.moe_router_group_topk
    pattern, layers, dispatcher = args.moe_layer_freq, args.num_layers, args.moe_token_dispatcher_type
    pattern_fits = pattern > 0 if isinstance(pattern, int) else is_pattern(pattern, layers)
    in_group = experts // groups if groups else 0  # experts of a group
    each = topk // chosen if chosen else 0  # experts chosen from each chosen group
    is_grouped = bool(experts) and args.moe_grouped_gemm and args.transformer_impl == "local" and not _runs_on_cpu()
    return [
        rule(args, "--expert-model-parallel-size", size == 1 or experts > 0 and _divides(size, experts),
             f"a divisor of --num-experts {experts}" if experts else "1 without --num-experts"),
        rule(args, "--expert-tensor-parallel-size", tensor == 1 or experts > 0, "1 without --num-experts"),
        rule(args, "--expert-tensor-parallel-size", tensor == 1 or not _runs_on_cpu(),
             "1 on a CPU: gloo has no gather of unequal shares"),
        rule(args, "--moe-token-dispatcher-type",
             dispatcher != "allgather" or _divides(size * tensor, dense * args.context_parallel_size),
             "alltoall, where --expert-tensor-parallel-size × --expert-model-parallel-size does not divide "
             "--tensor-model-parallel-size × --context-parallel-size: replicas have unequal numbers of tokens"),
        LayoutRule("--moe-ffn-hidden-size", ffn, not experts or ffn is None or _divides(tensor, ffn),
             f"a multiple of --expert-tensor-parallel-size {tensor}"),
        LayoutRule("--moe-ffn-hidden-size", ffn, not is_grouped or ffn is None or ffn % GROUPED_ALIGNED == 0,
             f"a multiple of {GROUPED_ALIGNED} with --moe-grouped-gemm"),
        rule(args, "--hidden-size", not is_grouped or args.hidden_size % GROUPED_ALIGNED == 0,
             f"a multiple of {GROUPED_ALIGNED} with --moe-grouped-gemm"),
        rule(args, "--moe-grouped-gemm", not is_grouped or args.bf16, "none without --bf16"),
        rule(args, "--moe-latent-size", latent is None or experts > 0 and latent > 0,
             "a number above 0, with --num-experts"),
        rule(args, "--moe-latent-size", latent is None or not args.add_bias_linear,
             "none without --disable-bias-linear"),
        rule(args, "--moe-shared-expert-intermediate-size",
             shared is None or shared > 0 and _divides(dense, shared),
             f"a multiple, above 0, of --tensor-model-parallel-size {dense}"),
        rule(args, "--moe-router-topk", not experts or 0 < topk <= experts, f"from 1 to --num-experts {experts}"),
        rule(args, "--moe-layer-freq", not experts or pattern_fits,
             f"a number above 0, or a pattern of {layers} zeros and ones, one for each of --num-layers"),
        rule(args, "--moe-router-num-groups", groups is None or experts > 0 and _divides(groups, experts),
             f"a divisor of --num-experts {experts}"),
        rule(args, "--moe-router-group-topk", (groups is None) == (chosen is None) and (
             chosen is None or 0 < chosen <= groups), f"from 1 to --moe-router-num-groups {groups}, both or neither"),
        rule(args, "--moe-router-topk", not groups or not chosen or args.moe_router_group_score == "max"
             or _divides(chosen, topk) and each <= in_group,
             f"a multiple of --moe-router-group-topk {chosen}, at most {in_group} in each of the chosen groups"),
        rule(args, "--moe-router-topk", not groups or not chosen or topk <= chosen * in_group,
             f"at most the {(chosen or 0) * in_group} experts of --moe-router-group-topk {chosen} groups"),
    ]  # fmt: skip


def _balancing(args) -> list[LayoutRule]:
    """Rules on losses and the bias that balance experts; the parser returns one value or a list of them."""
    kinds, weights = as_list(args.moe_router_load_balancing_type), as_list(args.moe_aux_loss_coeff)
    flag, factor, per_layer = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff", args.moe_z_loss_coeff
    names, numbers = " ".join(kinds), " ".join(map(str, weights))
    idle = [weight for kind, weight in zip(kinds, weights, strict=False) if kind not in BALANCING_LOSSES]
    bias, scores = args.moe_router_enable_expert_bias, args.moe_router_score_function
    return [
        LayoutRule(flag, names, set(kinds) <= {*BALANCING_LOSSES, "aux_loss", "none"},
             f"{', '.join(BALANCING_LOSSES)} or none: others route a token by the rest of its batch"),
        LayoutRule(flag, names, len(set(kinds)) == len(kinds), "each name once"),
        LayoutRule(factor, numbers, len(kinds) == len(weights), f"as many numbers as {flag} has names, {len(kinds)}"),
        LayoutRule(factor, numbers, all(0 <= weight < math.inf for weight in weights), "0 or more"),
        LayoutRule(factor, numbers, not any(idle), f"0 with {flag} {names}: allowed losses are "
             f"{' and '.join(BALANCING_LOSSES)}; aux_loss depends on the split into micro-batches"),
        rule(args, "--moe-z-loss-coeff", per_layer is None or 0 <= per_layer < math.inf, "0 or more"),
        rule(args, "--moe-router-enable-expert-bias", not bias or scores in ("sigmoid", "sqrtsoftplus"),
             f"none with --moe-router-score-function {scores}; use sigmoid or sqrtsoftplus"),
        rule(args, "--moe-router-bias-update-rate", 0 <= args.moe_router_bias_update_rate < math.inf, "0 or more"),
    ]  # fmt: skip


def is_pattern(pattern: list[int], layers: int) -> bool:
    """Whether a list has a zero or a one for each layer."""
    return len(pattern) == layers and set(pattern) <= {0, 1}


def as_list(value) -> list:
    """Returns a flag's values as a list; Megatron's parser returns one value or a list."""
    return value if isinstance(value, list) else [value]


def _training(role: str, args) -> list[LayoutRule]:
    tensor = args.tensor_model_parallel_size
    needs = args.num_experts and tensor > 1 and role in TRAINED
    return [
        rule(args, "--sequence-parallel", not args.sequence_parallel or tensor > 1,
             f"none with --tensor-model-parallel-size {tensor}: it splits over tensor-parallel ranks"),
        rule(args, "--tensor-model-parallel-size", not needs or args.sequence_parallel,
             "1 for a role that trains experts, or others with --sequence-parallel"),
    ]  # fmt: skip


def _sharding(args) -> list[LayoutRule]:
    """Rules on FSDP, which splits all parameters, experts included, over the data- and context-parallel ranks."""
    on, flag, tensor = args.use_torch_fsdp2, "--use-torch-fsdp2", args.tensor_model_parallel_size
    pipeline, expert = args.pipeline_model_parallel_size, args.expert_model_parallel_size
    return [
        LayoutRule(flag, on, not on or pipeline == 1, f"none with --pipeline-model-parallel-size {pipeline}"),
        LayoutRule(flag, on, not on or expert == 1, f"none with --expert-model-parallel-size {expert}"),
        LayoutRule(flag, on, not on or not args.use_distributed_optimizer, "none with --use-distributed-optimizer"),
        LayoutRule(flag, on, not on or not args.num_experts or tensor == 1,
             f"none with --num-experts {args.num_experts} and --tensor-model-parallel-size {tensor}"),
        LayoutRule(flag, on, not on or not args.fp16, "none with --fp16"),
    ]  # fmt: skip


def _runs_on_cpu() -> bool:
    """Whether ranks communicate over gloo; not in the fake world of a plan."""
    return device.backend() == "gloo" and not (dist.is_initialized() and dist.get_backend() == "fake")


def _groups(args):
    return args.num_query_groups if args.group_query_attention else None


def _has_dense_layers(args) -> bool:
    pattern = args.moe_layer_freq
    return not args.num_experts or (pattern != 1 if isinstance(pattern, int) else 0 in pattern)
