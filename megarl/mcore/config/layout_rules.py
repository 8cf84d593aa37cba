"""Rules on a role's flags that Megatron checks late, with unclear messages, or not at all: divisibility and ranges."""

import math

import torch.distributed as dist

from megarl.errors import Rule
from megarl.mcore import device
from megarl.mcore.config.model_flags import ROTARY
from megarl.mcore.config.rules import allow, is_pattern, min_value, positive, value_of, when

TRAINED = ("actor", "critic")  # roles that run backward
MAX_LAYERS = 100_000
# Sizes of 1 or more, if they are given.
SIZES = tuple(
    """
    ffn-hidden-size moe-ffn-hidden-size make-vocab-size-divisible-by tensor-model-parallel-size
    pipeline-model-parallel-size context-parallel-size expert-model-parallel-size expert-tensor-parallel-size
    """.split()
)
GROUPED_ALIGNED = 8  # sizes of grouped products on CUDA: rows begin at multiples of 16 bytes
BALANCING_LOSSES = ("seq_aux_loss", "global_aux_loss")  # losses that do not depend on the split into micro-batches


def rules(role: str, args) -> list[Rule]:
    """Returns all rules for a role's parsed namespace, before Megatron's own validation; their number is constant.
    `args.world_size` is the role's."""
    sizes = _sizes(args) + _ranges(args) + _ranks(args) + _attention(args) + _pipeline(args) + _virtual(args)
    return sizes + _experts(args) + _balancing(args) + _training(role, args) + _sharding(args)


def _divides(size: int, whole: int) -> bool:
    return size > 0 and whole % size == 0


def _sizes(args) -> list[Rule]:
    groups = _groups(args)
    return [
        allow("--num-layers", 1 <= args.num_layers <= MAX_LAYERS, f"from 1 to {MAX_LAYERS}"),
        *(min_value(args, f"--{name}") for name in ("hidden-size", "num-attention-heads")),
        allow("--num-query-groups", groups is None or groups >= 1, "1 or more", value=groups),
        min_value(args, "--v-head-dim" if args.multi_latent_attention else "--kv-channels"),
        min_value(args, "--num-experts", 0),
        *(min_value(args, f"--{name}") for name in SIZES),
    ]


def _ranges(args) -> list[Rule]:
    lr, floor, decay = args.lr, args.min_lr, args.lr_decay_iters or args.train_iters
    start, fraction, epsilon = args.lr_warmup_init, args.lr_warmup_fraction, args.layernorm_epsilon
    return [
        min_value(args, "--lr-decay-iters"),
        allow("--lr", 0 <= lr < math.inf, "0 or more"),
        allow("--min-lr", 0 <= floor <= lr, f"from 0 to --lr {lr}"),
        allow("--decoupled-min-lr", not args.decoupled_min_lr or bool(args.decoupled_lr),
              "none without --decoupled-lr"),
        allow("--clip-grad", args.clip_grad >= 0, "0 (off) or more"),
        allow("--weight-decay", args.weight_decay >= 0, "0 or more"),
        allow("--adam-beta1", 0 <= args.adam_beta1 < 1, "from 0 to below 1"),
        allow("--adam-beta2", 0 <= args.adam_beta2 < 1, "from 0 to below 1"),
        allow("--adam-eps", args.adam_eps > 0, "above 0"),
        allow("--max-position-embeddings", args.max_position_embeddings >= args.seq_length,
              f"{args.length_flags} = {args.seq_length} or more"),
        allow("--lr-warmup-iters", args.lr_warmup_iters < decay,
              f"below --lr-decay-iters (default --train-iters) {decay}"),
        min_value(args, "--lr-warmup-iters", 0),
        allow("--lr-warmup-init", start is None or 0 <= start <= lr, f"from 0 to --lr {lr}"),
        allow("--lr-wsd-decay-iters", args.lr_decay_style != "WSD" or args.lr_wsd_decay_iters is not None,
              "a number with --lr-decay-style WSD"),
        allow("--lr-warmup-fraction", fraction is None or 0 <= fraction < 1, "from 0 to below 1"),
        allow("--lr-warmup-fraction", fraction is None or not args.lr_warmup_iters, "none with --lr-warmup-iters"),
        allow("--init-method-std", 0 <= args.init_method_std < math.inf, "0 or more"),
        allow("--norm-epsilon", 0 < epsilon < math.inf, "above 0", value=epsilon),
        positive(args, "--loss-scale"),
        allow("--fp16", not args.fp16 or not args.bf16, "none with --bf16"),
        min_value(args, "--distributed-timeout-minutes"),
        min_value(args, "--ddp-bucket-size"),
        allow("--use-nccl-ub", not args.nccl_ub or device.has_cuda(), "none without CUDA", value=args.nccl_ub),
        *(positive(args, f"--{name}") for name in ("initial-loss-scale", "min-loss-scale", "loss-scale-window")),
        *(min_value(args, f"--{name}", 0) for name in ("decoupled-lr", "decoupled-min-lr", "start-weight-decay",
                                                       "end-weight-decay")),
        *(min_value(args, f"--{name}") for name in ("hysteresis", "lr-wsd-decay-iters")),
        _finite(args),
    ]  # fmt: skip


def _finite(args) -> Rule:
    """No flag has NaN or an infinity."""
    wrong = [name for name, value in vars(args).items() if isinstance(value, float) and not math.isfinite(value)]
    name = (*wrong, "clip_grad")[0]
    return allow(f"--{name.replace('_', '-')}", not wrong, "a finite number")


def _product(args, *kinds: str) -> Rule:
    """The product of the sizes must divide the role's ranks; the message names the flags above 1."""
    flags, ranks = (
        {f"--{kind}-parallel-size": value_of(args, f"{kind}-parallel-size") for kind in kinds},
        args.world_size,
    )
    *others, last = [item for item in flags.items() if item[1] > 1] or list(flags.items())[:1]
    name = "".join(f"{flag} {size} × " for flag, size in others) + last[0]
    allowed = f"{'a product that divides' if others else 'a divisor of'} the role's {ranks} rank(s)"
    return allow(name, _divides(math.prod(flags.values()), ranks), allowed, value=last[1])


def _ranks(args) -> list[Rule]:
    dense = _product(args, "tensor-model", "pipeline-model", "context")
    return [dense, _product(args, "expert-tensor", "expert-model", "pipeline-model")]


def _attention(args) -> list[Rule]:
    tensor, heads, groups = args.tensor_model_parallel_size, args.num_attention_heads, _groups(args)
    multiple, ffn = f"a multiple of --tensor-model-parallel-size {tensor}", args.ffn_hidden_size
    channels = args.kv_channels or args.hidden_size // max(heads, 1)
    is_shared = bool(groups) and tensor > groups and _divides(groups, tensor)  # ranks share a group
    ranks = tensor // groups if is_shared else 1
    return [
        allow("--num-attention-heads", _divides(tensor, heads), multiple),
        allow("--num-query-groups", groups is None or is_shared or _divides(tensor, groups),
              f"{multiple}, or a divisor of it", value=groups),
        allow("--kv-channels", 2 * channels % ranks == 0, "a size whose double is a multiple of the "
              f"{ranks} tensor-parallel ranks of a query group", value=channels),
        allow("--num-query-groups", groups is None or _divides(groups, heads),
              f"a divisor of --num-attention-heads {heads}", value=groups),
        allow("--hidden-size", bool(args.kv_channels) or _divides(heads, args.hidden_size),
              f"a multiple of --num-attention-heads {heads}, or any with --kv-channels"),
        allow("--kv-channels",
              args.position_embedding_type not in ROTARY or channels % 2 == 0 or args.multi_latent_attention,
              "an even number with rotary embeddings", value=channels),
        allow("--make-vocab-size-divisible-by", _divides(tensor, args.make_vocab_size_divisible_by), multiple),
        allow("--ffn-hidden-size", ffn is None or not _has_dense_layers(args) or _divides(tensor, ffn), multiple),
    ]  # fmt: skip


def _pipeline(args) -> list[Rule]:
    """Stages are equal, or the first and last have given sizes."""
    stages, layers = args.pipeline_model_parallel_size, args.num_layers
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    given, counted = _end_stages(args), _counted_layers(args)
    inner, inner_stages = layers - sum(given), stages - len(given)
    fits = inner == 0 if inner_stages == 0 else inner > 0 and _divides(inner_stages, inner)
    end_size = "from 1 to below --num-layers, with --pipeline-model-parallel-size above 1"
    ends = "--decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
    counts = "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split"
    equal = f"a multiple of --pipeline-model-parallel-size {stages} (layers counted: {counted}), or others with {ends}"
    even = f"one that splits equally: {inner} layer(s) are left for {inner_stages} stage(s) between {ends}"
    return [
        allow("--decoder-first-pipeline-num-layers", first is None or stages > 1 and 0 < first < layers, end_size),
        allow("--decoder-last-pipeline-num-layers", last is None or stages > 1 and 0 < last < layers, end_size),
        allow(counts, counted == layers or not given, f"none of them with {ends}", value=True),
        allow("--num-layers", bool(given) or _divides(stages, counted), equal),
        allow("--num-layers", not given or fits, even),
    ]


def _end_stages(args) -> list[int]:
    """The layers of the first and of the last stage, as far as flags set them."""
    return [x for x in (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers) if x is not None]


def _counted_layers(args) -> int:
    """Returns the layers to split over stages; embedding and loss count as one each if the flags say so."""
    return args.num_layers + args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split


def _stage_sizes(args) -> list[int]:
    """Returns the sizes of given end stages, then of an inner stage; meaningless for flags that break other rules."""
    given = _end_stages(args)
    stages = args.pipeline_model_parallel_size - len(given)
    return given + ([(_counted_layers(args) - sum(given)) // stages] if stages > 0 else [])


def _virtual(args) -> list[Rule]:
    stages, sizes = args.pipeline_model_parallel_size, _stage_sizes(args)
    per_stage, number = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    first, second = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
    is_uneven = len(sizes) > 1 or args.decoder_first_pipeline_num_layers or args.decoder_last_pipeline_num_layers
    min_stages = 2 if args.overlap_p2p_comm else 3
    flag, value = (first, per_stage) if number is None else (second, number)
    group = args.microbatch_group_size_per_vp_stage
    return [
        allow("--microbatch-group-size-per-virtual-pipeline-stage", group in (None, stages),
              f"--pipeline-model-parallel-size {stages}", value=group),
        min_value(args, first),
        min_value(args, second),
        allow(second, None in (per_stage, number), f"one of it and {first}"),
        allow(flag, value is None or value == 1 and flag == second or stages >= min_stages,
              f"none with --pipeline-model-parallel-size {stages}: virtual stages need {min_stages} or more"
              + ("" if min_stages == 2 else " without overlapped communication")),
        allow(first, per_stage is None or not is_uneven,
              f"{second} instead, because stages differ in size"),
        allow(first, per_stage is None or all(_divides(per_stage, size) for size in sizes),
              f"a divisor of the {sizes[0] if sizes else 0} layers of a stage"),
        allow(second, number is None or all(_divides(number, size) for size in sizes),
              f"a divisor of the layers of every stage ({', '.join(map(str, sizes))})"),
    ]  # fmt: skip


def _experts(args) -> list[Rule]:
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
        allow("--expert-model-parallel-size", size == 1 or experts > 0 and _divides(size, experts),
              f"a divisor of --num-experts {experts}" if experts else "1 without --num-experts"),
        allow("--expert-tensor-parallel-size", tensor == 1 or experts > 0, "1 without --num-experts"),
        allow("--expert-tensor-parallel-size", tensor == 1 or not _runs_on_cpu(),
              "1 on a CPU: gloo has no gather of unequal shares"),
        allow("--moe-token-dispatcher-type",
              dispatcher != "allgather" or _divides(size * tensor, dense * args.context_parallel_size),
              "alltoall, where --expert-tensor-parallel-size × --expert-model-parallel-size does not divide "
              "--tensor-model-parallel-size × --context-parallel-size: replicas have unequal numbers of tokens"),
        allow("--moe-ffn-hidden-size", not experts or ffn is None or _divides(tensor, ffn),
              f"a multiple of --expert-tensor-parallel-size {tensor}", value=ffn),
        allow("--moe-ffn-hidden-size", not is_grouped or ffn is None or ffn % GROUPED_ALIGNED == 0,
              f"a multiple of {GROUPED_ALIGNED} with --moe-grouped-gemm", value=ffn),
        allow("--hidden-size", not is_grouped or args.hidden_size % GROUPED_ALIGNED == 0,
              f"a multiple of {GROUPED_ALIGNED} with --moe-grouped-gemm"),
        allow("--moe-grouped-gemm", not is_grouped or args.bf16, "none without --bf16"),
        allow("--moe-latent-size", latent is None or experts > 0 and latent > 0,
              "a number above 0, with --num-experts"),
        allow("--moe-latent-size", latent is None or not args.add_bias_linear,
              "none without --disable-bias-linear"),
        allow("--moe-shared-expert-intermediate-size",
              shared is None or shared > 0 and _divides(dense, shared),
              f"a multiple, above 0, of --tensor-model-parallel-size {dense}"),
        allow("--moe-router-topk", not experts or 0 < topk <= experts, f"from 1 to --num-experts {experts}"),
        allow("--moe-layer-freq", not experts or pattern_fits,
              f"a number above 0, or a pattern of {layers} zeros and ones, one for each of --num-layers"),
        allow("--moe-router-num-groups", groups is None or experts > 0 and _divides(groups, experts),
              f"a divisor of --num-experts {experts}"),
        allow("--moe-router-group-topk", (groups is None) == (chosen is None) and (
              chosen is None or 0 < chosen <= groups), f"from 1 to --moe-router-num-groups {groups}, both or neither"),
        allow("--moe-router-topk", not groups or not chosen or args.moe_router_group_score == "max"
              or _divides(chosen, topk) and each <= in_group,
              f"a multiple of --moe-router-group-topk {chosen}, at most {in_group} in each of the chosen groups"),
        allow("--moe-router-topk", not groups or not chosen or topk <= chosen * in_group,
              f"at most the {(chosen or 0) * in_group} experts of --moe-router-group-topk {chosen} groups"),
    ]  # fmt: skip


def _balancing(args) -> list[Rule]:
    """Rules on losses and the bias that balance experts; the parser returns one value or a list of them."""
    kinds, weights = as_list(args.moe_router_load_balancing_type), as_list(args.moe_aux_loss_coeff)
    flag, factor, per_layer = "--moe-router-load-balancing-type", "--moe-aux-loss-coeff", args.moe_z_loss_coeff
    names, numbers = " ".join(kinds), " ".join(map(str, weights))
    idle = [weight for kind, weight in zip(kinds, weights, strict=False) if kind not in BALANCING_LOSSES]
    bias, scores = args.moe_router_enable_expert_bias, args.moe_router_score_function
    return [
        allow(flag, set(kinds) <= {*BALANCING_LOSSES, "aux_loss", "none"},
              f"{', '.join(BALANCING_LOSSES)} or none: others route a token by the rest of its batch", value=names),
        allow(flag, len(set(kinds)) == len(kinds), "each name once", value=names),
        allow(factor, len(kinds) == len(weights), f"as many numbers as {flag} has names, {len(kinds)}", value=numbers),
        allow(factor, all(0 <= weight < math.inf for weight in weights), "0 or more", value=numbers),
        allow(factor, not any(idle),
              f"0 with {flag} {names}: allowed losses are {' and '.join(BALANCING_LOSSES)}; aux_loss depends on the "
              "split into micro-batches", value=numbers),
        allow("--moe-z-loss-coeff", per_layer is None or 0 <= per_layer < math.inf, "0 or more"),
        allow("--moe-router-enable-expert-bias", not bias or scores in ("sigmoid", "sqrtsoftplus"),
              f"none with --moe-router-score-function {scores}; use sigmoid or sqrtsoftplus"),
        allow("--moe-router-bias-update-rate", 0 <= args.moe_router_bias_update_rate < math.inf, "0 or more"),
    ]  # fmt: skip


def as_list(value) -> list:
    """A flag's values; Megatron's parser returns one value or a list."""
    return value if isinstance(value, list) else [value]


def _training(role: str, args) -> list[Rule]:
    tensor = args.tensor_model_parallel_size
    needs = args.num_experts and tensor > 1 and role in TRAINED
    not_split = f"none with --tensor-model-parallel-size {tensor}: it splits over tensor-parallel ranks"
    of_experts = "1 for a role that trains experts, or others with --sequence-parallel"
    return [
        allow("--sequence-parallel", not args.sequence_parallel or tensor > 1, not_split),
        allow("--tensor-model-parallel-size", not needs or args.sequence_parallel, of_experts),
    ]


def _sharding(args) -> list[Rule]:
    """Rules on FSDP, which splits all parameters, experts included, over the data- and context-parallel ranks."""
    on, flag, tensor = args.use_torch_fsdp2, "--use-torch-fsdp2", args.tensor_model_parallel_size
    pipeline, expert = args.pipeline_model_parallel_size, args.expert_model_parallel_size
    experts = f"--num-experts {args.num_experts} and --tensor-model-parallel-size {tensor}"
    found = [
        allow(flag, pipeline == 1, f"none with --pipeline-model-parallel-size {pipeline}"),
        allow(flag, expert == 1, f"none with --expert-model-parallel-size {expert}"),
        allow(flag, not args.use_distributed_optimizer, "none with --use-distributed-optimizer"),
        allow(flag, not args.num_experts or tensor == 1, f"none with {experts}"),
        allow(flag, not args.fp16, "none with --fp16"),
    ]
    return when(on, found)


def _runs_on_cpu() -> bool:
    """Whether ranks communicate over gloo; not in the fake world of a plan."""
    return device.backend() == "gloo" and not (dist.is_initialized() and dist.get_backend() == "fake")


def _groups(args):
    return args.num_query_groups if args.group_query_attention else None


def _has_dense_layers(args) -> bool:
    pattern = args.moe_layer_freq
    return not args.num_experts or (pattern != 1 if isinstance(pattern, int) else 0 in pattern)
