"""Megatron's flags: its own parser and checks, one validated namespace a role, every flag used or refused."""

import argparse
import contextlib
import dataclasses
import functools
import io
import math
import traceback
import warnings

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.training.arguments import add_megatron_arguments, core_transformer_config_from_args, validate_args

from megarl.errors import UsageError
from megarl.mcore import device
from megarl.mcore.groups import ParallelSizes

# Read by megarl (or by Megatron's own translation of arguments into configs) besides the fields of the configs.
READ_BY_MODEL = {
    "add_position_embedding", "bias_gelu_fusion", "bias_swiglu_fusion", "group_query_attention", "swiglu",
    "squared_relu", "quick_geglu", "init_method_xavier_uniform", "make_vocab_size_divisible_by",
    "max_position_embeddings", "no_persist_layer_norm", "position_embedding_type", "rotary_base", "rotary_percent",
    "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor", "recompute_activations",
    "untie_embeddings_and_output_weights", "pretrained_checkpoint", "use_rotary_position_embeddings",
}  # fmt: skip
READ_BY_SCHEDULER = {
    "lr_decay_iters", "lr_decay_style", "lr_warmup_fraction", "lr_warmup_init", "lr_warmup_iters",
    "lr_wsd_decay_iters", "lr_wsd_decay_style", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style",
    "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler",
}  # fmt: skip
READ_BY_DDP = {"accumulate_allreduce_grads_in_fp32", "ddp_bucket_size", "ddp_average_in_collective"}
READ_BY_PROGRAM = {"distributed_timeout_minutes"}

# A destination of the parser -> the only value this version runs, and why a wrong answer would be worse than a refusal.
ONLY = {
    "pipeline_model_parallel_size": (1, "pipeline stages are not supported yet"),
    "context_parallel_size": (1, "context parallelism is not supported yet"),
    "expert_model_parallel_size": (1, "expert parallelism is not supported yet"),
    "sequence_parallel": (False, "sequence parallelism is not supported yet"),
    "num_experts": (None, "mixture-of-experts models are not supported yet"),
    "multi_latent_attention": (False, "multi-latent attention is not supported yet"),
    "transformer_impl": ("local", "only Megatron's local layers are supported yet"),
    "fp8": (None, "fp8 is not supported yet"),
    "fp4": (None, "fp4 is not supported yet"),
    "attention_dropout": (0.0, "dropout would make log-probs of one text differ"),
    "hidden_dropout": (0.0, "dropout would make log-probs of one text differ"),
    "average_in_collective": (False, "losses are local sums over global counts, so gradients are summed"),
    "cuda_graph_impl": ("none", "CUDA graphs are not supported yet"),
    "use_torch_fsdp2": (False, "sharded parameters are not supported yet"),
    "use_megatron_fsdp": (False, "sharded parameters are not supported yet"),
    "position_embedding_type": (("rope", "learned_absolute", "none"), "other position embeddings are not supported"),
    "optimizer": ("adam", "other optimizers are not supported yet"),
    "use_precision_aware_optimizer": (False, "it needs Transformer Engine"),
    "optimizer_cpu_offload": (False, "optimizer offload is not supported yet"),
    "mtp_num_layers": (None, "multi-token prediction is not supported yet"),
    "num_distributed_optimizer_instances": (1, "one optimizer instance is supported"),
    "window_size": (None, "sliding-window attention is not supported yet"),
    "softmax_type": ("vanilla", "attention sinks are not supported yet"),
    "layernorm_zero_centered_gamma": (False, "zero-centred norms are not supported yet"),
    "attention_backend": (AttnBackend.auto, "attention runs through PyTorch's SDPA"),
}

DEFAULTS = [
    "--micro-batch-size", "1", "--transformer-impl", "local", "--no-rope-fusion", "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion", "--no-bias-dropout-fusion", "--attention-dropout", "0", "--hidden-dropout", "0",
    "--attention-backend", "auto", "--position-embedding-type", "rope", "--tokenizer-type", "NullTokenizer",
    "--lr", "1e-5", "--calculate-per-token-loss", "--no-check-for-nan-in-loss-and-grad",
]  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megatron", allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    return parser


@functools.cache
def destinations() -> dict[str, str]:
    """Every option string of Megatron's parser -> the attribute it sets."""
    return {option: action.dest for action in _parser()._actions for option in action.option_strings}


@functools.cache
def used() -> frozenset[str]:
    """Attributes that change what megarl does; a flag for any other is refused."""
    configs = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    fields = {field.name for config in configs for field in dataclasses.fields(config)}
    return frozenset(fields | READ_BY_MODEL | READ_BY_SCHEDULER | READ_BY_DDP | READ_BY_PROGRAM)


def _refuse_unused(role: str, argv: list[str], extra: frozenset[str]):
    for token in argv:
        option = token.split("=", 1)[0]
        dest = destinations().get(option)
        if dest is not None and dest not in used() | extra:
            raise UsageError(f"{role}: {option} is a Megatron flag that megarl does not use; remove it")


def _check_only(role: str, args):
    for dest, (allowed, reason) in ONLY.items():
        value = getattr(args, dest, None)
        choices = allowed if isinstance(allowed, tuple) else (allowed,)
        if value not in choices and value is not None:
            flag = next(option for option, name in destinations().items() if name == dest)
            raise UsageError(f"{role}: {flag} {value}: {reason} (allowed: {', '.join(map(str, choices))})")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    # A bare assertion says nothing: quote the condition that failed.
    return text or (traceback.extract_tb(error.__traceback__)[-1].line or type(error).__name__)


def _check_divisible(role: str, args):
    tensor, ranks = args.tensor_model_parallel_size, args.world_size
    heads, groups, divisor = args.num_attention_heads, _groups(args), args.make_vocab_size_divisible_by
    rules = [
        ("--tensor-model-parallel-size", tensor, tensor > 0 and ranks % tensor == 0,
         f"a divisor of the role's {ranks} rank(s) in --role-map"),
        ("--num-attention-heads", heads, heads % tensor == 0, f"a multiple of --tensor-model-parallel-size {tensor}"),
        ("--num-query-groups", groups, not groups or groups % tensor == 0,
         f"a multiple of --tensor-model-parallel-size {tensor}"),
        ("--num-query-groups", groups, not groups or heads % groups == 0,
         f"a divisor of --num-attention-heads {heads}"),
        ("--hidden-size", args.hidden_size, args.kv_channels or args.hidden_size % heads == 0,
         f"a multiple of --num-attention-heads {heads}, or --kv-channels beside it"),
        ("--make-vocab-size-divisible-by", divisor, divisor % tensor == 0,
         f"a multiple of --tensor-model-parallel-size {tensor}"),
    ]  # fmt: skip
    _refuse_first(role, rules)


def _check_ranges(role: str, args):
    lr, floor, divisor = args.lr, args.min_lr, args.make_vocab_size_divisible_by
    decay = args.lr_decay_iters or args.train_iters
    rules = [
        ("--num-layers", args.num_layers, args.num_layers > 0, "1 or more"),
        ("--hidden-size", args.hidden_size, args.hidden_size > 0, "1 or more"),
        ("--num-attention-heads", args.num_attention_heads, args.num_attention_heads > 0, "1 or more"),
        ("--lr", lr, lr is not None and 0 <= lr < math.inf, "0 or more"),
        ("--min-lr", floor, 0 <= floor <= lr, f"from 0 to --lr {lr}"),
        ("--clip-grad", args.clip_grad, args.clip_grad >= 0, "0 (off) or more"),
        ("--weight-decay", args.weight_decay, args.weight_decay >= 0, "0 or more"),
        ("--adam-beta1", args.adam_beta1, 0 <= args.adam_beta1 < 1, "from 0 to below 1"),
        ("--adam-beta2", args.adam_beta2, 0 <= args.adam_beta2 < 1, "from 0 to below 1"),
        ("--adam-eps", args.adam_eps, args.adam_eps > 0, "above 0"),
        ("--make-vocab-size-divisible-by", divisor, divisor > 0, "1 or more"),
        ("--max-position-embeddings", args.max_position_embeddings, args.max_position_embeddings >= args.seq_length,
         f"--max-prompt-length + --max-response-length = {args.seq_length} or more"),
        ("--lr-warmup-iters", args.lr_warmup_iters, args.lr_warmup_iters < decay,
         f"below --lr-decay-iters, or else --train-iters, {decay}"),
    ]  # fmt: skip
    _refuse_first(role, rules)


def _refuse_first(role: str, rules: list[tuple[str, object, bool, str]]):
    for flag, value, fine, allowed in rules:
        if not fine:
            raise UsageError(f"{role}: {flag} {value}: allowed is {allowed}")


def _groups(args):
    return args.num_query_groups if args.group_query_attention else None


def parse(role: str, argv: list[str], ranks: int, own: dict, extra: frozenset[str] = frozenset()):
    """Megatron's namespace of one role, validated for that many ranks.

    Args:
        argv: the role's Megatron flags, common ones first, its own behind them.
        own: attributes that megarl decides (train_iters, seed, seq_length …); they win.
        extra: attributes that the calling program reads besides those in `used()`.

    Raises:
        UsageError: an unknown, unused or wrong flag; one line that names role, flag, value and what is allowed.
    """
    _refuse_unused(role, argv, extra)
    try:
        args = _parser().parse_args(DEFAULTS + argv)
    except UsageError as error:
        raise UsageError(f"{role}: {error}") from None
    batch, args.global_batch_size = args.global_batch_size, None  # megarl's batches need no divisibility
    if batch is not None and batch < 1:
        raise UsageError(f"{role}: --global-batch-size {batch}: allowed is 1 or more")
    args.rank, args.world_size = 0, ranks
    for name, value in own.items():
        setattr(args, name, value)
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    _check_only(role, args)
    for flag in ("num_layers", "hidden_size", "num_attention_heads"):
        if not getattr(args, flag):
            raise UsageError(f"{role}: --{flag.replace('_', '-')} is missing: the model's shape has no default")
    if args.tensor_model_parallel_size < 1:
        size = args.tensor_model_parallel_size
        raise UsageError(f"{role}: --tensor-model-parallel-size {size}: allowed is 1 or more")
    _check_ranges(role, args)
    _check_divisible(role, args)
    args = _validated(role, args)
    args.global_batch_size = batch  # None where it was not given: megarl has no default that depends on the layout
    return args


def _validated(role: str, args):
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            validate_args(args)
            args.use_cpu_initialization = args.use_cpu_initialization or not device.has_cuda()
            transformer_config(args)
    except (AssertionError, ValueError, TypeError, RuntimeError, SystemExit) as error:
        raise UsageError(f"{role}: Megatron refuses these flags: {_one_line(error)}") from None
    if not args.bf16 and not args.fp16:
        args.params_dtype = torch.float32
    return args


def transformer_config(args) -> TransformerConfig:
    """Megatron's model config; weights start the same for every tensor-parallel size on the CPU path."""
    return core_transformer_config_from_args(args)


def parallel_sizes(args) -> ParallelSizes:
    """The role's parallel sizes, for `create_groups`."""
    return ParallelSizes(
        tensor=args.tensor_model_parallel_size,
        pipeline=args.pipeline_model_parallel_size,
        context=args.context_parallel_size,
        expert=args.expert_model_parallel_size,
        expert_tensor=args.expert_tensor_parallel_size or 1,
    )
